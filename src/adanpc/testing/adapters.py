"""check_adapter: whether a test-time method keeps the promises of ``Adapter``, tested on a toy problem."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from adanpc.lab.adapt.adapter import Adapter, BatchError, Source
from adanpc.lab.networks.source import SourceModel

CLASSES = 3
SIDE = 8  # width and height of an image in pixels
DIM = 16  # length of a feature
ROWS = 6  # samples in a batch
LONG = 25  # batches in a long stream: enough for NOTE and RoTTA, which collect images before they learn
# Batches of it after which a state is saved: after 5, SAR has learned and not yet started over; after 22, so have NOTE
# and RoTTA.
CUTS = (5, 22)


def check_adapter(kind: type[Adapter], **settings: Any) -> None:
    """Runs every check on a test-time method; the first that fails raises an AssertionError.

    Args:
        kind: the class of the method.
        **settings: its hyper-parameters; those that are not given have the defaults of the class.
    """
    for check in ADAPTER_CHECKS:
        check(kind, **settings)


# The toy problem -------------------------------------------------------------------------------------------------


@lru_cache
def toy_source() -> Source:
    """A small trained model with BatchNorm and a rotation head, and the features of its 60 training images."""
    # Trained in the same way whatever mode the caller is in, and without using up the caller's random numbers.
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128, DIM),
        )
        model = SourceModel(encoder, DIM, CLASSES)
        rotation_head = nn.Linear(DIM, 4)
        images, labels = toy_images(60, seed=1)
        optimizer = torch.optim.Adam([*model.parameters(), *rotation_head.parameters()], lr=1e-2)
        for _ in range(40):
            turns = torch.randint(4, (60,))
            turned = [image.rot90(int(turn), (1, 2)) for image, turn in zip(images, turns, strict=True)]
            class_loss = cross_entropy(model(images), labels)
            guessed_turns = rotation_head(model.features(torch.stack(turned)))
            loss = class_loss + cross_entropy(guessed_turns, turns)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            features = model.features(images)
    return Source(
        model,
        features,
        labels,
        images=lambda rows: images[rows],
        lr=1e-2,
        rotation_head=rotation_head,
    )


def toy_images(count: int, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) of three patterns with noise, brighter by ``shift``, and their labels (n,)."""
    patterns = torch.rand(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 1, SIDE, SIDE, generator=generator)
    return patterns[labels] + shift + 0.1 * noise, labels


def toy_stream(kind: type[Adapter], batches: int, rows: int = ROWS, first: int = 0) -> list[Tensor]:
    """Batches of a shifted domain, as images or as features, whichever the method takes.

    Args:
        kind: the class of the method.
        batches: the number of batches.
        rows: the number of samples in each batch.
        first: the number of the first batch; batches with other numbers hold other images.
    """
    images = [toy_images(rows, seed=100 + first + number, shift=0.3)[0] for number in range(batches)]
    if kind.sees == "images":
        return images
    with torch.no_grad():
        return [toy_source().model.features(batch) for batch in images]


def long_stream(kind: type[Adapter]) -> list[Tensor]:
    """A stream that is long enough for methods that wait before they learn: 25 batches of three rows or more.

    Each image is a mixture of two patterns, so that answers range from confident to even; most are doubtful. The seeds
    are chosen so that the first batch is not too doubtful: SAR follows the average of such losses, and starts over when
    it is low.
    """
    rows = max(3, kind.least)
    batches = []
    for number in range(LONG):
        generator = torch.Generator().manual_seed(542 + number)
        one, _ = toy_images(rows, seed=242 + number, shift=0.3)
        other, _ = toy_images(rows, seed=342 + number, shift=0.3)
        share = 0.5 + 0.2 * torch.rand(rows, 1, 1, 1, generator=generator)
        batches.append(share * one + (1 - share) * other)
    if kind.sees == "images":
        return batches
    with torch.no_grad():
        return [toy_source().model.features(batch) for batch in batches]


def run(adapter: Adapter, batches: Sequence[Tensor], first: int = 0) -> list[Tensor]:
    """The answers to a stream; the random seed of each batch is its number, counted from ``first``."""
    answers = []
    for number, batch in enumerate(batches):
        torch.manual_seed(first + number)
        answers.append(adapter.step(batch).detach().clone())
    return answers


def assert_equal(one: Sequence[Tensor], other: Sequence[Tensor], sentence: str) -> None:
    """Asserts that two lists of answers are the same to the bit."""
    same = [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
    assert all(same), sentence


# The checks ------------------------------------------------------------------------------------------------------


def check_declarations(kind: type[Adapter], **settings: Any) -> None:
    """What the class says of itself can be true, and its methods take a batch alone: nobody gives them labels."""
    name = kind.__name__
    assert kind.sees in ("images", "features"), f"{name}: sees must be 'images' or 'features', got {kind.sees!r}"
    for fact in ("least", "passes"):
        value = getattr(kind, fact)
        is_count = isinstance(value, int) and value >= 1
        assert is_count, f"{name}: {fact} must be a whole number of at least 1, got {value!r}"
    for method in ("answer", "step", "predict"):
        required = _required_arguments(getattr(kind, method))
        sentence = f"{name}.{method} must take a batch and nothing else, never labels; it takes {', '.join(required)}"
        assert len(required) == 1, sentence


def _required_arguments(method: Callable[..., Any]) -> list[str]:
    """The names of the arguments that a method cannot do without, except for ``self``."""
    _, *arguments = signature(method).parameters.values()
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [each.name for each in arguments if each.default is Parameter.empty and each.kind not in variable]


def check_leaves_what_it_is_given(kind: type[Adapter], **settings: Any) -> None:
    """Neither the batches nor the source change: they belong to the caller, and other methods are given them, too."""
    source = deepcopy(toy_source())  # a method that changes its source must not spoil the one of later checks
    assert source.rotation_head is not None
    parts = {
        "model": source.model.state_dict(),
        "rotation head": source.rotation_head.state_dict(),
        "features": source.features,
        "labels": source.labels,
    }
    before = deepcopy(parts)
    adapter = kind(source, **settings)
    for number, batch in enumerate(long_stream(kind)):
        given = batch.clone()
        run(adapter, [given], first=number)
        assert torch.equal(given, batch), f"{kind.__name__} changes the batches that it is given"
    changed = [name for name, part in parts.items() if not _same(part, before[name])]
    assert not changed, f"{kind.__name__} changes its source: {', '.join(changed)}"


def check_one_by_one(kind: type[Adapter], **settings: Any) -> None:
    """A method that says that it answers ``one_by_one`` learns nothing about a row from others in its batch."""
    if not kind.one_by_one:
        return
    batches = toy_stream(kind, 2)
    together = run(kind(toy_source(), **settings), batches)
    adapter = kind(toy_source(), **settings)
    for number, (batch, expected) in enumerate(zip(batches, together, strict=True)):
        torch.manual_seed(number)
        alone = torch.cat([adapter.step(row) for row in batch.split(1)])
        same = torch.allclose(alone, expected, atol=1e-5)
        assert same, f"{kind.__name__} says that it answers one by one, but the rest of a batch changes its answers"


def check_probabilities(kind: type[Adapter], **settings: Any) -> None:
    """Answers are probabilities for each query: finite, not negative, with a sum of 1; and they have no gradients."""
    adapter = kind(toy_source(), **settings)
    batch = toy_stream(kind, 1)[0]
    equal_rows = batch[:1].repeat_interleave(ROWS, 0)
    streams = {
        "a stream": toy_stream(kind, 4),
        "equal rows": [equal_rows, equal_rows],
    }
    if kind.sees == "images":
        constant = torch.full((ROWS, 1, SIDE, SIDE), 0.5)
        streams["constant images"] = [constant, constant]
    for name, batches in streams.items():
        for probs, queries in zip(run(adapter, batches), batches, strict=True):
            assert probs.shape == (len(queries), CLASSES), f"{kind.__name__}: shape {tuple(probs.shape)} on {name}"
            assert _are_probabilities(probs), f"{kind.__name__}: no probabilities on {name}: {probs}"
    assert not adapter.step(batch).requires_grad, f"{kind.__name__}: answers carry gradients"


def check_one_row(kind: type[Adapter], **settings: Any) -> None:
    """A batch of one is answered, or refused if ``kind.least`` is larger; an empty batch is answered."""
    adapter = kind(toy_source(), **settings)
    batch = toy_stream(kind, 1, rows=1)[0]
    try:
        assert adapter.step(batch).isfinite().all(), f"{kind.__name__}: a batch of one gets no finite answer"
        assert kind.least == 1, f"{kind.__name__} says that it needs {kind.least} rows, but accepts one"
    except BatchError:
        assert kind.least > 1, f"{kind.__name__} refuses a batch of one without saying so in `least`"
    assert adapter.step(batch[:0]).shape == (0, CLASSES), f"{kind.__name__}: an empty batch has no answer"


def check_reset(kind: type[Adapter], **settings: Any) -> None:
    """After ``reset`` the same stream gets the same answers, to the bit."""
    adapter = kind(toy_source(), **settings)
    batches = long_stream(kind)
    before = run(adapter, batches)
    adapter.reset()
    assert_equal(before, run(adapter, batches), f"{kind.__name__}: after reset the answers differ")


def check_state(kind: type[Adapter], **settings: Any) -> None:
    """The state can be saved in mid-stream and loaded without running code, and a new adapter continues identically."""
    batches = long_stream(kind)
    expected = run(kind(toy_source(), **settings), batches)
    for cut in CUTS:
        _check_state_after(cut, batches, expected, kind, **settings)


def _check_state_after(
    cut: int, batches: Sequence[Tensor], expected: Sequence[Tensor], kind: type[Adapter], **settings: Any
) -> None:
    """Saves and loads the state after ``cut`` of these batches, whose answers are ``expected``."""
    next_batches = batches[cut : cut + 3]
    next_answers = expected[cut : cut + 3]
    saved = kind(toy_source(), **settings)
    run(saved, batches[:cut])
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    loaded = kind(toy_source(), **settings)
    run(loaded, toy_stream(kind, 2, first=50))  # loading must replace everything that it learned here
    loaded.load_state_dict(torch.load(file, weights_only=True))
    continued = run(loaded, next_batches, first=cut)
    assert_equal(next_answers, continued, f"{kind.__name__} does not continue from its state")

    copy = kind(toy_source(), **settings)
    copy.load_state_dict(saved.state_dict())
    run(copy, batches[:2])  # this must not alter the adapter whose state was copied
    continued = run(saved, next_batches, first=cut)
    assert_equal(next_answers, continued, f"{kind.__name__}: an adapter that loaded its state still alters it")
    copy.reset()
    assert_equal(expected[:4], run(copy, batches[:4]), f"{kind.__name__}: reset does not undo what was loaded")


def check_moves(kind: type[Adapter], **settings: Any) -> None:
    """Only the tensors that ``moving`` names change; if it names any, a long stream moves some."""
    source = toy_source()
    moved = _moved(kind(source, **settings), toy_stream(kind, 5))
    adapter = kind(source, **settings)
    declared = adapter.moving()
    unknown = sorted(declared - set(adapter.state_dict()))
    assert not unknown, f"{kind.__name__} declares {unknown}: no such tensors"
    moved |= _moved(adapter, long_stream(kind))
    assert moved <= declared, f"{kind.__name__} moves {sorted(moved - declared)}, which it does not declare"
    names = ", ".join(sorted(declared))
    sentence = f"{kind.__name__} declares {names} as moving, but none of them moves in {LONG} batches"
    assert moved or not declared, sentence


def _moved(adapter: Adapter, batches: Sequence[Tensor]) -> set[str]:
    """The names of the tensors that differ from those at the start after any of these batches."""
    start = {name: value.clone() for name, value in _tensors(adapter).items()}
    moved = set()
    for number, batch in enumerate(batches):
        run(adapter, [batch], first=number)
        # After every batch, since a method may start over and end as it began.
        for name, value in _tensors(adapter).items():
            if not _same(value, start.get(name)):
                moved.add(name)
    return moved


def check_predict(kind: type[Adapter], **settings: Any) -> None:
    """``predict`` answers as ``step`` would, and changes neither the state nor later answers, to the bit."""
    batches = long_stream(kind)[: CUTS[0]]
    expected = run(kind(toy_source(), **settings), batches)
    adapter = kind(toy_source(), **settings)
    answers = []
    for number, batch in enumerate(batches):
        before = deepcopy(adapter.state_dict())
        probs = adapter.predict(batch)
        assert probs.shape == (len(batch), CLASSES), f"{kind.__name__}: predict gives shape {tuple(probs.shape)}"
        assert _are_probabilities(probs), f"{kind.__name__}: predict gives no probabilities: {probs}"
        after = adapter.state_dict()
        changed = [name for name in before if not _same(after.get(name), before[name])]
        assert not changed, f"{kind.__name__}: predict changes {changed}"
        answers += run(adapter, [batch], first=number)
    assert_equal(expected, answers, f"{kind.__name__}: predict changes later answers")
    # In a larger batch, predict may answer each row as if it came first; for the smallest batch, both must agree.
    smallest = toy_stream(kind, 1, rows=kind.least, first=10)[0]
    torch.manual_seed(0)
    predicted = adapter.predict(smallest).clone()
    assert_equal([predicted], run(adapter, [smallest]), f"{kind.__name__}: predict does not answer as step would")


def check_predict_copies_only_what_moves(kind: type[Adapter], **settings: Any) -> None:
    """``predict`` copies no tensor that never changes: a method without moving tensors copies nothing at all."""
    adapter = kind(toy_source(), **settings)
    batch = toy_stream(kind, 1)[0]
    run(adapter, [batch])  # the first step makes a copy of what moves, for reset
    fixed = {}  # the names of tensors that never change, by their address in memory
    for name, value in _tensors(adapter).items():
        if name not in adapter.moving():
            fixed[value.data_ptr()] = name
    with _Copies() as by_predict:
        adapter.predict(batch)
    with _Copies() as by_step:
        adapter.step(batch)
    copied = (by_predict.addresses - by_step.addresses) & fixed.keys()
    names = sorted(fixed[address] for address in copied)
    assert not names, f"{kind.__name__}: predict copies {names}, which never change"
    if not adapter.moving() and not adapter.optimizers and not adapter.banks and not adapter.extra():
        count = by_predict.count - by_step.count
        assert count <= 0, f"{kind.__name__} never moves, but predict makes {count} copies more than step"


def check_is_deterministic(kind: type[Adapter], **settings: Any) -> None:
    """The same stream and seeds give the same answers."""
    batches = toy_stream(kind, 4)
    one = run(kind(toy_source(), **settings), batches)
    other = run(kind(toy_source(), **settings), batches)
    assert_equal(one, other, f"{kind.__name__} gives different answers to the same stream with the same seeds")


def check_bad_batches(kind: type[Adapter], **settings: Any) -> None:
    """A batch with NaN is refused with a BatchError, and changes nothing."""
    adapter = kind(toy_source(), **settings)
    batches = toy_stream(kind, 4)
    expected = run(kind(toy_source(), **settings), batches)
    bad = batches[0].clone()
    bad[0] = torch.nan
    answers = []
    for number, batch in enumerate(batches):
        try:
            adapter.step(bad)
            raise AssertionError(f"{kind.__name__} accepts NaN")
        except BatchError:
            answers += run(adapter, [batch], first=number)
    assert_equal(expected, answers, f"{kind.__name__}: a refused batch changed later answers")


def check_surroundings(kind: type[Adapter], **settings: Any) -> None:
    """Calls inside ``torch.no_grad`` or ``torch.inference_mode`` give the same answers."""
    batches = toy_stream(kind, 3)
    expected = run(kind(toy_source(), **settings), batches)
    for mode in (torch.no_grad, torch.inference_mode):
        adapter = kind(toy_source(), **settings)
        with mode():
            answers = run(adapter, [batch.clone() for batch in batches])
            adapter.predict(batches[0])
            adapter.reset()
        assert_equal(expected, answers, f"{kind.__name__}: answers differ under {mode.__name__}")
        again = run(adapter, batches)
        assert_equal(expected, again, f"{kind.__name__}: answers differ after predict and reset under {mode.__name__}")


ADAPTER_CHECKS: tuple[Callable[..., None], ...] = (
    check_declarations,
    check_leaves_what_it_is_given,  # before checks that fail for the same reason
    check_probabilities,
    check_one_row,
    check_one_by_one,
    check_moves,  # before checks that fail for the same reason, because it names the tensors
    check_reset,
    check_state,
    check_predict,
    check_predict_copies_only_what_moves,
    check_is_deterministic,
    check_bad_batches,
    check_surroundings,
)


class _Copies(TorchFunctionMode):
    """Records the copies of tensors that are made inside a ``with``: how many, and the addresses of the originals."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.addresses: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.clone, Tensor.__deepcopy__):
            self.count += 1
            self.addresses.add(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


def _are_probabilities(probs: Tensor) -> bool:
    """Whether rows are finite, not negative and sum to 1."""
    sums = probs.sum(1)
    sum_to_one = torch.allclose(sums, torch.ones_like(sums), atol=1e-4)
    return sum_to_one and bool(probs.isfinite().all()) and bool((probs >= 0).all())


def _tensors(adapter: Adapter) -> dict[str, Tensor]:
    """The parameters and buffers by name, without the extra states, which are other values."""
    return {name: value for name, value in adapter.state_dict().items() if isinstance(value, Tensor)}


def _same(one: Any, other: Any) -> bool:
    """Whether two states are the same to the bit; they may be tensors, or mappings and sequences of them."""
    if isinstance(one, Tensor):
        if not isinstance(other, Tensor) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        return _bytes(one) == _bytes(other)  # compared as bytes, NaN equals itself
    if isinstance(one, Mapping):
        if not isinstance(other, Mapping) or one.keys() != other.keys():
            return False
        return all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return False
        return all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()
