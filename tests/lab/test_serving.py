"""What a service of images needs: the encoder of a bank, and the images behind its rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from adanpc.errors import AdaNPCError
from adanpc.lab.banks import of_run, source_parts
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.sample import Sample, make
from adanpc.lab.serving import encoder_of_name, encoder_of_run, image_encoder, image_finder
from adanpc.lab.train.run import Run
from adanpc.models.inputs import InputError
from adanpc.models.recipe import RecipeError


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return make(tmp_path_factory.mktemp("serving") / "sample", count=3, steps=2)


def test_images_of_source_rows_are_those_whose_features_are_in_the_bank(sample: Sample) -> None:
    """The image that is shown for a row, encoded as a query is, has the features that the bank was made of."""
    run = Run(sample.run)
    model = encoder_of_run(sample.run, "best")
    find = image_finder(sample.run)
    encode = image_encoder(model, of_run(run).recipe, 64)
    key = 0
    for domain in source_parts(run):
        prepared = domain.with_transform(model.preprocessing)
        with torch.no_grad():
            expected = model.features(prepared.take(list(range(len(domain)))))
        images = [find(number) for number in range(key, key + len(domain))]
        found = encode([image for image in images if image is not None])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        key += len(domain)
    assert key == sample.source_rows
    assert find(key) is None


def test_images_in_folders_are_found_by_the_order_in_which_they_are_read(data_dir: Path) -> None:
    find = image_finder(data_dir)
    image = find(0)
    assert image is not None
    assert image.shape == (8, 8, 3)
    first = sorted(path for path in data_dir.rglob("*.png"))[0]
    np.testing.assert_array_equal(image, np.asarray(Image.open(first)))
    assert find(10_000) is None


def test_a_model_that_did_not_make_the_bank_is_refused(sample: Sample) -> None:
    recipe = of_run(Run(sample.run)).recipe
    model = encoder_of_run(sample.run, "best")
    with pytest.raises(AdaNPCError, match="makes features of 64 numbers, but the bank has 12"):
        image_encoder(model, {}, 12)
    other = encoder_of_name("cifar-resnet-20", 6)
    with pytest.raises(RecipeError):
        image_encoder(other, recipe, 64)


def test_an_image_that_the_model_cannot_take_is_the_callers_mistake() -> None:
    model = SourceModel(nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 5)), 5, 2).eval()
    encode = image_encoder(model, {}, 5)
    assert encode([np.zeros((4, 4, 3), np.uint8)]).shape == (1, 5)
    with pytest.raises(InputError, match="does not accept images of 7 x 9 pixels"):
        encode([np.zeros((9, 7, 3), np.uint8)])


def test_a_model_of_one_channel_gets_gray_images() -> None:
    convolution = nn.Conv2d(1, 1, 1, bias=False)
    nn.init.ones_(convolution.weight)
    model = SourceModel(nn.Sequential(convolution, nn.Flatten()), 1, 2).eval()
    encode = image_encoder(model, {}, 1)
    red = np.zeros((1, 1, 3), np.uint8)
    red[..., 0] = 255
    assert encode([red]).item() == pytest.approx(0.299)
    assert torch.equal(encode([np.zeros((1, 1, 3), np.uint8)]), torch.zeros(1, 1))
