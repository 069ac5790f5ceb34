"""Training algorithms move a model as DomainBed's do, and the KNN loss is that of its authors."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adanpc import losses
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Algorithm, Batch
from adanpc.lab.train.inputs import Contextual, Mixup
from adanpc.lab.train.registry import ALGORITHMS

CLASSES = 3
DOMAINS = 3
DIM = 8
ADVERSARIAL = {
    "weight": 0.7,
    "lr_d": 2e-2,
    "weight_decay_d": 1e-3,
    "beta1": 0.5,
    "gradient_penalty": 0.4,
    "d_steps": 2,
    "mlp_width": 8,
    "mlp_depth": 3,
}
# The settings that the peer had.
CASES: dict[str, dict[str, Any]] = {
    "erm": {},
    "irm": {"weight": 50.0, "anneal": 3},
    "vrex": {"weight": 20.0, "anneal": 3},
    "group-dro": {"rate": 0.5},
    "mixup": {},
    "mldg": {"weight": 0.8, "n_meta_test": 1},
    "coral": {"weight": 2.0},
    "mmd": {"weight": 2.0},
    "dann": ADVERSARIAL,
    "cdann": ADVERSARIAL,
    "mtl": {"ema": 0.9},
    "sag-net": {"weight": 0.5},
    "arm": {},
    "rsc": {"drop_features": 0.3, "drop_rows": 0.3},
    "fish": {"meta_lr": 0.3},
    "fishr": {"weight": 100.0, "anneal": 3, "ema": 0.8},
}
# DomainBed reports the loss without the penalty, or that of the last domain.
OTHER_LOSS = ("coral", "mmd", "fish")


class Encoder(nn.Module):
    """A convolution, which ARM widens, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.linear = nn.Linear(36, DIM)

    def forward(self, images: Tensor) -> Tensor:
        maps = torch.tanh(self.conv(images))
        features: Tensor = torch.tanh(self.linear(maps.flatten(1)))
        return features


def trained(name: str) -> Algorithm:
    """An algorithm with the settings of its peer."""
    model = SourceModel(Encoder(), DIM, CLASSES)
    algorithm = ALGORITHMS[name](model, DOMAINS, lr=1e-2, weight_decay=1e-3, **CASES[name])
    if isinstance(model.encoder, Contextual):
        for parameter in model.encoder.context.parameters():
            parameter.requires_grad_(False)  # DomainBed never trains it
    return algorithm


def set_state(algorithm: Algorithm, flat: Tensor) -> None:
    """Sets all tensors of an algorithm to the numbers of a vector, one after another."""
    place = 0
    for value in algorithm.state_dict().values():
        value.copy_(flat[place : place + value.numel()].view_as(value))
        place += value.numel()
    assert place == len(flat)


def weights_of(algorithm: Algorithm) -> Tensor:
    """What the peer trains, as one vector: encoder and head, without ARM's context net."""
    weights = []
    for name, value in algorithm.model.named_parameters():
        if "context" not in name:
            weights.append(value.detach().flatten())
    return torch.cat(weights)


def fix_what_is_random(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders are shifted by one (Fish: none), and shares are 0.3, as they were in the peer."""
    shift = 0 if name == "fish" else 1
    monkeypatch.setattr(torch, "randperm", lambda count: torch.arange(count).roll(shift))
    monkeypatch.setattr(torch, "rand", lambda *shape: torch.full(shape, 0.3))
    monkeypatch.setattr(Mixup, "_shares", lambda self, count: [0.3] * count)


@pytest.mark.no_cover
@pytest.mark.parametrize("name", CASES)
def test_the_model_moves_as_in_domainbed(
    name: str, training: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adanpc.lab.train.inputs.WIDTH", 4)
    algorithm = trained(name)
    set_state(algorithm, training[f"{name}/before"])
    before = weights_of(algorithm)
    fix_what_is_random(name, monkeypatch)
    algorithm.train()
    reported = []
    for images, labels in zip(training["images"], training["labels"], strict=True):
        batches = []
        for domain in range(DOMAINS):
            batches.append(Batch(images[domain], labels[domain], torch.arange(len(labels[domain]))))
        reported.append(algorithm.update(batches)["loss"])
    after = training[f"{name}/after"]
    torch.testing.assert_close(weights_of(algorithm), after, atol=2e-7, rtol=0)
    assert (after - before).abs().max() > 5e-3  # the peer has learned
    if name not in OTHER_LOSS:
        torch.testing.assert_close(torch.tensor(reported), training[f"{name}/losses"], atol=1e-6, rtol=0)


def test_every_algorithm_of_domainbed_is_compared() -> None:
    own = {"knn", "rotation"}  # the paper's loss, below, and joint training for TTT: not in DomainBed
    assert set(CASES) == set(ALGORITHMS) - own


def test_the_knn_loss_is_that_of_its_authors(training: dict[str, Tensor]) -> None:
    """Queue, search, vote, loss and gradient; ours adds the same 1e-5 to every class, and scales the sum to 1."""
    classes = 4
    ours = losses.KNNLoss(DIM, classes, k=7, temperature=0.1, size=len(training["knn/start"]))
    ours.start(training["knn/start"], training["knn/start_labels"])
    scaling = log(1 + classes * 1e-5)
    batches = zip(training["knn/features"], training["knn/labels"], strict=True)
    for number, (rows, labels) in enumerate(batches):
        features = rows.clone().requires_grad_()
        loss = ours(features, labels)
        loss.backward()
        torch.testing.assert_close(loss.detach() - scaling, training["knn/losses"][number], atol=1e-6, rtol=0)
        torch.testing.assert_close(features.grad, training["knn/gradients"][number], atol=1e-6, rtol=0)
