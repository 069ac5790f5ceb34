"""Test-time training by rotation against training written out."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sources import images, source
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, BatchError, Source
from adanpc.lab.adapt.augment import flip, shift
from adanpc.lab.adapt.rotation import TTT, TTTOnline, turned
from adanpc.lab.train.rotation import turned as turned_in_training
from adanpc.testing import check_adapter

METHODS: list[tuple[type[Adapter], dict[str, Any]]] = [
    (TTT, {"copies": 3, "steps": 2}),
    (TTT, {"copies": 2, "lr": 0.1, "steps": 1, "mirror": False}),
    (TTTOnline, {"copies": 3}),
    (TTTOnline, {"copies": 4, "lr": 1e-2, "steps": 2, "mirror": False}),
]
EACH = pytest.mark.parametrize(("kind", "hypers"), METHODS, ids=str)


def rotating(norm: str = "group") -> Source:
    start = source(norm)
    torch.manual_seed(8)
    return replace(start, rotation_head=nn.Linear(6, 4))


def by_hand(start: Source, batch: Tensor, copies: int, lr: float, steps: int, online: bool) -> Tensor:
    """Test-time training with torch's SGD on copies of model and head; the class head is not part of the loss."""
    model = deepcopy(start.model).eval()
    head = deepcopy(start.rotation_head)
    assert head is not None
    pair = nn.ModuleList([model, head])
    first = deepcopy(pair.state_dict())
    answers = []
    for image in batch.split(1):
        if not online:
            pair.load_state_dict(first)
        optimizer = torch.optim.SGD(pair.parameters(), lr=lr)
        for _ in range(steps):
            views = flip(shift(image.expand(copies, -1, -1, -1)))
            turns = torch.randint(4, (copies,))
            views = torch.tensor(
                np.stack([np.rot90(v, int(t), (1, 2)) for v, t in zip(views.numpy(), turns, strict=True)])
            )
            optimizer.zero_grad()
            cross_entropy(head(model.features(views)), turns).backward()
            optimizer.step()
        answers.append(model(image).detach().softmax(1))
    return torch.cat(answers)


@pytest.mark.parametrize(("kind", "online"), [(TTT, False), (TTTOnline, True)])
@pytest.mark.parametrize("norm", ["none", "group", "batch2d"])
@pytest.mark.parametrize("steps", [1, 3])
def test_ttt_is_gradient_descent_on_the_loss_of_rotations(
    kind: type[Adapter], online: bool, norm: str, steps: int
) -> None:
    start = rotating(norm)
    batch = images(4)
    torch.manual_seed(2)
    made = kind(start, copies=5, lr=0.2, steps=steps).step(batch)  # type: ignore[call-arg]
    torch.manual_seed(2)
    torch.testing.assert_close(made, by_hand(start, batch, 5, 0.2, steps, online), atol=1e-5, rtol=1e-4)


def test_images_are_turned_as_in_training() -> None:
    batch = images(20)
    all_turns, _ = turned_in_training(batch)
    torch.manual_seed(0)
    views, turns = turned(batch)
    assert set(turns.tolist()) == {0, 1, 2, 3}
    for number, (view, turn) in enumerate(zip(views, turns.tolist(), strict=True)):
        assert torch.equal(view, all_turns[turn * len(batch) + number])


@EACH
def test_a_batch_is_its_images_one_by_one(kind: type[Adapter], hypers: dict[str, Any]) -> None:
    batch = images(5)
    together = kind(rotating("batch2d"), **hypers)
    alone = kind(rotating("batch2d"), **hypers)
    torch.manual_seed(1)
    expected = together.step(batch)
    torch.manual_seed(1)
    assert torch.equal(expected, torch.cat([alone.step(image) for image in batch.split(1)]))


def test_ttt_is_itself_again_after_every_image() -> None:
    adapter = TTT(rotating("batch2d"), copies=3, lr=0.5, steps=2)
    new = TTT(rotating("batch2d"), copies=3, lr=0.5, steps=2)
    batch = images(3)
    before = {name: value.clone() for name, value in adapter.state_dict().items() if isinstance(value, Tensor)}
    for _ in range(3):
        torch.manual_seed(4)
        made = adapter.step(batch)
    assert all(torch.equal(adapter.state_dict()[name], value) for name, value in before.items())
    torch.manual_seed(4)
    assert torch.equal(made, new.step(batch))
    assert adapter.moving() == set()


def test_online_all_but_the_class_head_and_the_statistics_moves() -> None:
    adapter = TTTOnline(rotating("batch2d"), copies=4, lr=0.5)
    before = {name: value.clone() for name, value in adapter.state_dict().items() if isinstance(value, Tensor)}
    for seed in range(3):
        adapter.step(images(4, seed=seed))
    moved = {name for name, value in before.items() if not torch.equal(adapter.state_dict()[name], value)}
    assert moved == adapter.moving()
    still = set(before) - moved
    assert {"model.head.weight", "model.head.bias"} < still
    assert all(name.startswith("model.head.") or "running" in name or "tracked" in name for name in still)


def test_online_the_rotations_of_a_stream_are_learned() -> None:
    start = rotating()
    batch = images(6)
    views, turns = turned_in_training(batch)

    def loss(adapter: TTTOnline) -> float:
        with torch.no_grad():
            return float(cross_entropy(adapter.rotation_head(adapter.model.features(views)), turns))

    adapter = TTTOnline(start, lr=0.05, mirror=False)
    before = loss(adapter)
    for seed in range(15):
        torch.manual_seed(seed)
        adapter.step(batch)
    assert loss(adapter) < before - 0.05


def test_online_a_descent_into_nowhere_is_refused_and_not_kept() -> None:
    adapter = TTTOnline(rotating(), copies=2, lr=torch.inf)
    before = {name: value.clone() for name, value in adapter.named_parameters()}
    with pytest.raises(AdaNPCError, match="its probabilities are not finite: reset, and use a smaller lr"):
        adapter.step(images(1))
    assert all(torch.equal(value, before[name]) for name, value in adapter.named_parameters())


def test_a_source_without_rotations_is_refused() -> None:
    for kind in (TTT, TTTOnline):
        with pytest.raises(
            AdaNPCError, match="the source has no rotation head: train its model with the algorithm 'rotation'"
        ):
            kind(source("none"))


@pytest.mark.parametrize("shape", [(2, 1, 8, 6), (2, 6)])
def test_images_that_cannot_be_turned_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(BatchError, match="a quarter turn needs square images"):
        TTT(rotating()).step(torch.zeros(shape))


@pytest.mark.parametrize("name", ["copies", "steps"])
def test_useless_numbers_are_refused(name: str) -> None:
    with pytest.raises(AdaNPCError, match=f"{name} must be at least 1, got 0"):
        TTT(rotating(), **{name: 0})  # type: ignore[arg-type]


@pytest.mark.no_cover
def test_the_contract_holds_with_other_settings() -> None:
    check_adapter(TTT, copies=2, lr=0.1, steps=1, mirror=False)
    check_adapter(TTTOnline, copies=4, lr=1e-2, steps=2, mirror=False)
