"""What every test-time method promises."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adanpc.lab.adapt.adapter import Adapter, BatchError, Source
from adanpc.lab.networks.source import SourceModel

CLASSES, SIDE, ROWS = 3, 8, 6


def check_adapter(kind: type[Adapter], **settings: Any) -> None:
    """Runs every check on a test-time method.

    Args:
        kind: the class.
        **settings: its hyper-parameters; by default its own defaults.
    """
    for check in ADAPTER_CHECKS:
        check(kind, **settings)


@lru_cache
def toy_source() -> Source:
    """A small trained model with BatchNorm and a rotation head, and the features of its 60 training images."""
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16)
        )
        model, rotation = SourceModel(encoder, 16, CLASSES), nn.Linear(16, 4)
        images, labels = toy_images(60, seed=1)
        optimizer = torch.optim.Adam([*model.parameters(), *rotation.parameters()], lr=1e-2)
        for _ in range(40):
            turns = torch.randint(4, (60,))
            turned = torch.stack([image.rot90(int(turn), (1, 2)) for image, turn in zip(images, turns, strict=True)])
            loss = cross_entropy(model(images), labels) + cross_entropy(rotation(model.features(turned)), turns)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            features = model.features(images)
    return Source(model, features, labels, None, lambda rows: images[rows], 1e-2, rotation)


def toy_images(count: int, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) of three patterns with noise, brighter by the shift, and their labels."""
    patterns = torch.rand(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return patterns[labels] + shift + 0.1 * torch.randn(count, 1, SIDE, SIDE, generator=generator), labels


def toy_stream(kind: type[Adapter], batches: int, rows: int = ROWS, first: int = 0) -> list[Tensor]:
    """Batches of a shifted domain, as the method wants them."""
    images = [toy_images(rows, seed=100 + first + number, shift=0.3)[0] for number in range(batches)]
    if kind.sees == "images":
        return images
    with torch.no_grad():
        return [toy_source().model.features(batch) for batch in images]


def run(adapter: Adapter, batches: list[Tensor], first: int = 0) -> list[Tensor]:
    """The answers to a stream; what is random is seeded by the position."""
    answers = []
    for number, batch in enumerate(batches):
        torch.manual_seed(first + number)
        answers.append(adapter.step(batch).detach().clone())
    return answers


def assert_equal(one: list[Tensor], other: list[Tensor], sentence: str) -> None:
    """Fails with the sentence unless both are the same to the bit."""
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), sentence


def check_probabilities(kind: type[Adapter], **settings: Any) -> None:
    """Answers are probabilities: one row for each query, finite, none negative, sums of 1; without gradient."""
    adapter = kind(toy_source(), **settings)
    streams = {
        "a stream": toy_stream(kind, 4),
        "equal rows": [toy_stream(kind, 1)[0][:1].expand(ROWS, *[-1] * (3 if kind.sees == "images" else 1))] * 2,
    }
    if kind.sees == "images":
        streams["constant images"] = [torch.full((ROWS, 1, SIDE, SIDE), 0.5)] * 2
    for name, batches in streams.items():
        for probs, batch in zip(run(adapter, batches), batches, strict=True):
            assert probs.shape == (len(batch), CLASSES), f"{kind.__name__}: shape {tuple(probs.shape)} on {name}"
            good = (
                probs.isfinite().all()
                and (probs >= 0).all()
                and torch.allclose(probs.sum(1), torch.ones(len(batch)), atol=1e-4)
            )
            assert good, f"{kind.__name__}: no probabilities on {name}: {probs}"
    assert not adapter.step(toy_stream(kind, 1)[0]).requires_grad, f"{kind.__name__}: answers carry gradients"


def check_one_row(kind: type[Adapter], **settings: Any) -> None:
    """A batch of one is answered, or refused by name if the class says that it needs more; none is answered by none."""
    adapter = kind(toy_source(), **settings)
    batch = toy_stream(kind, 1, rows=1)[0]
    try:
        assert adapter.step(batch).isfinite().all(), f"{kind.__name__}: a batch of one gets no finite answer"
        assert kind.least == 1, f"{kind.__name__} says that it needs {kind.least} rows, but takes one"
    except BatchError:
        assert kind.least > 1, f"{kind.__name__} refuses a batch of one without saying so in `least`"
    assert adapter.step(batch[:0]).shape == (0, CLASSES), f"{kind.__name__}: a batch of none has no answer"


def check_reset(kind: type[Adapter], **settings: Any) -> None:
    """After ``reset`` the same stream gets the same answers, to the bit."""
    adapter, batches = kind(toy_source(), **settings), toy_stream(kind, 5)
    before = run(adapter, batches)
    adapter.reset()
    assert_equal(before, run(adapter, batches), f"{kind.__name__}: after reset the answers differ")


def check_state(kind: type[Adapter], **settings: Any) -> None:
    """The state goes through a file in mid-stream, without running code, and a new adapter continues identically."""
    whole, batches = kind(toy_source(), **settings), toy_stream(kind, 8)
    expected = run(whole, batches)
    first = kind(toy_source(), **settings)
    run(first, batches[:4])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = kind(toy_source(), **settings)
    run(second, toy_stream(kind, 2, first=50))  # its own past must not matter
    second.load_state_dict(torch.load(file, weights_only=True))
    assert_equal(expected[4:], run(second, batches[4:], first=4), f"{kind.__name__} does not continue from its state")
    third = kind(toy_source(), **settings)
    third.load_state_dict(first.state_dict())
    run(third, batches[:2])
    assert_equal(expected[4:], run(first, batches[4:], first=4), f"{kind.__name__}: a copy of its state still moves it")
    third.reset()
    assert_equal(expected[:4], run(third, batches[:4]), f"{kind.__name__}: reset does not undo what was loaded")


def check_moves(kind: type[Adapter], **settings: Any) -> None:
    """Only declared tensors move, and the source model is left alone."""
    source = toy_source()
    before = deepcopy(source.model.state_dict())
    adapter = kind(source, **settings)
    start = {name: value.clone() for name, value in adapter.state_dict().items() if isinstance(value, Tensor)}
    run(adapter, toy_stream(kind, 5))
    moved = {
        name
        for name, value in adapter.state_dict().items()
        if isinstance(value, Tensor) and not _same(value, start.get(name))
    }
    declared = adapter.moving()
    assert moved <= declared, f"{kind.__name__} moves {sorted(moved - declared)}, which it does not declare"
    assert declared <= set(adapter.state_dict()), (
        f"{kind.__name__} declares {sorted(declared - set(start))}: no such tensors"
    )
    same = all(torch.equal(value, before[name]) for name, value in source.model.state_dict().items())
    assert same, f"{kind.__name__} changes the source model"


def _same(value: Tensor, before: Tensor | None) -> bool:
    return before is not None and value.shape == before.shape and torch.equal(value, before)


def check_is_deterministic(kind: type[Adapter], **settings: Any) -> None:
    """The same stream and seeds give the same answers."""
    batches = toy_stream(kind, 4)
    one, other = (run(kind(toy_source(), **settings), batches) for _ in range(2))
    assert_equal(one, other, f"{kind.__name__} is not decided by its stream and seed")


def check_bad_batches(kind: type[Adapter], **settings: Any) -> None:
    """NaN is refused by name, and changes nothing."""
    adapter, batches = kind(toy_source(), **settings), toy_stream(kind, 4)
    expected = run(kind(toy_source(), **settings), batches)
    bad = batches[0].clone()
    bad[0] = torch.nan
    answers = []
    for number, batch in enumerate(batches):
        try:
            adapter.step(bad)
            raise AssertionError(f"{kind.__name__} takes NaN")
        except BatchError:
            answers += run(adapter, [batch], first=number)
    assert_equal(expected, answers, f"{kind.__name__}: a refused batch changed later answers")


def check_surroundings(kind: type[Adapter], **settings: Any) -> None:
    """The answers do not depend on whether the caller computes gradients, or switched them off for good."""
    batches = toy_stream(kind, 3)
    expected = run(kind(toy_source(), **settings), batches)
    for mode in (torch.no_grad, torch.inference_mode):
        adapter = kind(toy_source(), **settings)
        with mode():
            answers = run(adapter, [batch.clone() for batch in batches])
        assert_equal(expected, answers, f"{kind.__name__}: answers differ under {mode.__name__}")


ADAPTER_CHECKS: tuple[Callable[..., None], ...] = (
    check_probabilities,
    check_one_row,
    check_reset,
    check_state,
    check_moves,
    check_is_deterministic,
    check_bad_batches,
    check_surroundings,
)
