"""SourceModel: its parts in order, frozen statistics, and any classifier split at its head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adanpc.errors import AdaNPCError
from adanpc.lab.networks import Preprocessing, SourceModel
from adanpc.models.recipe import fingerprint


def encoder() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def train(model: SourceModel, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(torch.randn(8, 3, 6, 6)), torch.arange(8) % 2).backward()
        optimizer.step()


def statistics(model: SourceModel) -> list[Tensor]:
    return [value.clone() for name, value in model.encoder.state_dict().items() if "running" in name or "num_" in name]


def test_logits_are_the_head_of_the_norm_of_the_encoder() -> None:
    torch.manual_seed(0)
    model, images = SourceModel(encoder(), 4, 2, norm=True, dropout=0.5), torch.randn(5, 3, 6, 6)
    assert isinstance(model.norm, nn.BatchNorm1d)
    model.norm.running_mean = torch.randn(4)
    model.norm.running_var = torch.rand(4) + 0.5
    model.eval()
    raw = model.encoder(images)
    features = (raw - model.norm.running_mean) / (model.norm.running_var + model.norm.eps).sqrt()
    torch.testing.assert_close(model.features(images), features)
    assert isinstance(model.head, nn.Linear)
    torch.testing.assert_close(model(images), features @ model.head.weight.T + model.head.bias)


def test_dropout_comes_before_the_norm_and_in_training_alone() -> None:
    model, images = SourceModel(encoder(), 4, 2, norm=True, dropout=1.0), torch.randn(5, 3, 6, 6)
    assert not model.features(images).any()  # nothing is left, and the norm of nothing is its shift, zero
    assert model.eval().features(images).any()


@pytest.mark.parametrize("call", [False, True])
def test_frozen_statistics_stay_while_weights_are_trained(call: bool) -> None:
    torch.manual_seed(0)
    model = SourceModel(encoder(), 4, 2, norm=True, frozen_batchnorm=True)
    if call:
        nn.Sequential(model).train()  # also as a part of something larger
    before, scale = statistics(model), model.encoder.get_parameter("1.weight").clone()
    train(model)
    assert all(map(torch.equal, statistics(model), before))
    assert not torch.equal(model.encoder.get_parameter("1.weight"), scale)
    assert isinstance(model.norm, nn.BatchNorm1d)
    assert int(model.norm.num_batches_tracked or 0) == 3  # the norm before the head is no part of the encoder


def test_statistics_follow_the_data_unless_frozen() -> None:
    model = SourceModel(encoder(), 4, 2)
    before = statistics(model)
    train(model)
    assert not any(map(torch.equal, statistics(model), before))


def test_a_given_head_is_taken() -> None:
    head = nn.Linear(4, 2)
    model = SourceModel(encoder(), 4, 2, head=head)
    assert model.head is head
    assert model.device == torch.device("cpu")


@pytest.mark.parametrize(("dim", "classes"), [(0, 2), (4, 0)])
def test_a_model_of_nothing_is_refused(dim: int, classes: int) -> None:
    with pytest.raises(AdaNPCError, match=f"got {dim} and {classes}"):
        SourceModel(encoder(), dim, classes)


class Nested(nn.Module):
    """A linear layer in the middle, and the head deep inside, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(encoder(), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
        self.top = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)))
        self.alias = self.top[1]

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.alias(self.top[0](self.body(images)))
        return logits


@pytest.mark.parametrize("training", [True, False])
def test_any_classifier_is_split_at_its_last_linear_layer(training: bool) -> None:
    torch.manual_seed(0)
    model, images, preprocessing = Nested().train(training), torch.randn(6, 3, 6, 6), Preprocessing(size=6)
    model.body.get_submodule("0.1").eval()
    before, modes, random = fingerprint(model), [part.training for part in model.modules()], torch.get_rng_state()
    made = SourceModel.of(model, images, preprocessing=preprocessing)
    assert fingerprint(model) == before
    assert [part.training for part in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert made.training is training
    assert [part.training for part in made.encoder.modules() if isinstance(part, nn.BatchNorm2d)] == [False]
    assert made.preprocessing == preprocessing
    assert (made.dim, made.classes) == (4, 4)
    model.eval()
    made.eval()
    with torch.no_grad():
        torch.testing.assert_close(made(images), model(images))
        torch.testing.assert_close(made.features(images), model.top[0](model.body(images)))
        made.head.get_parameter("weight").zero_()
    assert fingerprint(model) == before


class Aliased(nn.Module):
    """One head by two names, called by the second."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.first = encoder(), nn.Linear(4, 3)
        self.second = self.first

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.second(self.encoder(images))
        return logits


def test_a_head_with_two_names_is_taken_off_by_both() -> None:
    model, images = Aliased().eval(), torch.randn(2, 3, 6, 6)
    made = SourceModel.of(model, images)
    torch.testing.assert_close(made.features(images), model.encoder(images))
    torch.testing.assert_close(made(images), model(images))


def test_a_linear_layer_that_is_used_twice_is_refused() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(encoder(), layer, nn.ReLU(), layer)
    with pytest.raises(AdaNPCError, match="the linear layer '1' is used more than once"):
        SourceModel.of(model, torch.randn(5, 3, 6, 6))


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (nn.Linear(3, 2), torch.randn(4, 3), "got a Linear alone"),
        (nn.Sequential(nn.ReLU(), nn.Linear(3, 2)), torch.randn(4, 5, 3), "got a Sequential that makes other outputs"),
        (
            nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)),
            torch.randn(4, 3),
            "no linear layer returns exactly what the model returns",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(model: nn.Module, inputs: Tensor, message: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(AdaNPCError, match=message):
        SourceModel.of(model, inputs)
