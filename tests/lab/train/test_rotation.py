"""Joint training with rotations against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from adanpc.errors import AdaNPCError
from adanpc.lab.train.algorithm import Batch
from adanpc.lab.train.erm import ERM
from adanpc.lab.train.rotation import Rotation, turned
from adanpc.testing.algorithms import advance, assert_same, toy_batches, toy_model, weights


def test_images_are_turned_as_numpy_turns_them() -> None:
    images = torch.rand(3, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    found, turns = turned(images)
    assert turns.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    for place, turn in enumerate(turns.tolist()):
        for channel in range(2):
            assert np.array_equal(found[place, channel], np.rot90(images[place % 3, channel].numpy(), turn))


def test_loss_is_that_of_the_loops() -> None:
    algorithm = Rotation(toy_model(), 3, weight=0.6)
    batches = [Batch(*(part[: 2 + place] for part in batch)) for place, batch in enumerate(toy_batches(0))]
    loss, parts = algorithm.loss(batches)
    risk = [cross_entropy(algorithm(batch.images), batch.labels).item() for batch in batches]
    rotation = []
    for image in torch.cat([batch.images for batch in batches]):
        for turn in range(4):
            logits = algorithm.rotation_head(algorithm.model.features(torch.rot90(image, turn, (1, 2))[None]))[0]
            rotation.append(-logits.log_softmax(0)[turn].item())
    assert len(rotation) == 4 * 9
    assert parts["risk"].item() == pytest.approx(np.mean(risk), rel=1e-5)
    assert parts["rotation"].item() == pytest.approx(np.mean(rotation), rel=1e-5)
    assert loss.item() == pytest.approx(np.mean(risk) + 0.6 * np.mean(rotation), rel=1e-5)


def test_rotations_train_the_encoder_and_their_own_head_but_not_the_classes() -> None:
    algorithm, batches = Rotation(toy_model(), 3), toy_batches(0)
    images, turns = turned(torch.cat([batch.images for batch in batches]))
    cross_entropy(algorithm.rotation_head(algorithm.model.features(images)), turns).backward()
    reached = {name for name, parameter in algorithm.named_parameters() if parameter.grad is not None}
    assert {name for name in reached if name.startswith("model.head")} == set()
    assert {name for name, _ in algorithm.named_parameters() if not name.startswith("model.head")} == reached


def test_rotations_are_learned() -> None:
    algorithm = Rotation(toy_model(), 3, lr=5e-3)
    advance(algorithm, range(60))
    algorithm.eval()
    images, turns = turned(toy_batches(-1)[1].images)
    found = algorithm.rotation_head(algorithm.model.features(images)).argmax(1)
    assert (found == turns).float().mean() > 0.7


def test_without_weight_it_is_erm_to_the_bit() -> None:
    plain, special = ERM(toy_model(), 3), Rotation(toy_model(), 3, weight=0.0)
    advance(plain, range(6))
    advance(special, range(6))
    assert_same(weights(plain), weights(special), "not ERM")


def test_a_checkpoint_brings_the_rotation_head() -> None:
    first, second = Rotation(toy_model(), 3), Rotation(toy_model(1), 3)
    advance(first, range(3))
    second.restore(first.checkpoint())
    assert torch.equal(first.rotation_head.weight, second.rotation_head.weight)
    moments = [made.optimizers["model"].state_dict()["state"] for made in (first, second)]
    assert len(moments[1]) == len(moments[0]) == len(list(first.parameters()))


def test_identical_images_and_a_single_class_are_harmless() -> None:
    algorithm = Rotation(toy_model(), 3)
    batch = Batch(torch.full((4, 1, 8, 8), 0.5), torch.full((4,), 2), torch.arange(4))
    assert np.isfinite([algorithm.update([batch] * 3)["loss"] for _ in range(4)]).all()


def test_images_that_are_not_square_are_refused() -> None:
    with pytest.raises(AdaNPCError, match="a quarter turn needs square images, got 4 x 6"):
        turned(torch.zeros(1, 1, 4, 6))
