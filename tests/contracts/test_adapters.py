"""Every registered test-time method meets the shipped contract, and the contract notices those that do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt import ADAPTERS, Adapter, Source
from adanpc.testing import ADAPTER_CHECKS, check_adapter
from adanpc.testing.adapters import CUTS, long_stream, run, toy_source, toy_stream

# Methods that train on many views of each image do so on a few; all others have their defaults.
FEWER: dict[str, dict[str, int]] = {
    "memo": {"copies": 4},
    "ttaug": {"copies": 4},
    "ttt": {"copies": 4, "steps": 2},
    "ttt-online": {"copies": 4},
    "boost-adapter": {"views": 20},
    "boost-adapter-published": {"views": 20},
    "cotta": {"views": 4},
}


@pytest.mark.no_cover
@pytest.mark.parametrize("check", ADAPTER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ADAPTERS)
def test_contract(name: str, check: Callable[..., None]) -> None:
    check(ADAPTERS[name], **FEWER.get(name, {}))


class Counting(Adapter):
    """Counts the batches, and shifts its answers by that; meets the contract."""

    sees = "features"
    count: Tensor

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.register_buffer("count", torch.zeros(1))
        self.history = [0]

    def moving(self) -> set[str]:
        return {"count"}

    def answer(self, batch: Tensor) -> Tensor:
        self.count += 1
        self.history.append(self.history[-1] + 1)
        logits: Tensor = self.model.head(batch)
        logits[:, 0] += self.count + self.history[-1]
        return logits.softmax(1)

    def extra(self) -> dict[str, Any]:
        return {"history": list(self.history)}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        self.history = list(extra["history"])


class SharesItsExtra(Counting):
    def extra(self) -> dict[str, Any]:
        return {"history": self.history}


class MovesInSecret(Counting):
    def moving(self) -> set[str]:
        return set()


class ForgetsItsExtra(Counting):
    def take_extra(self, extra: Mapping[str, Any]) -> None:
        pass


class CopiesEverything(Counting):
    def predict(self, batch: Tensor) -> Tensor:
        before = deepcopy(self.state_dict())
        try:
            return self.step(batch)
        finally:
            self.load_state_dict(before)


class PredictsSomethingElse(Counting):
    def predict(self, batch: Tensor) -> Tensor:
        probs: Tensor = self.model.head(batch).softmax(1)
        return probs


class DeclaresAndStays(Counting):
    """Names a tensor that it never changes."""

    def answer(self, batch: Tensor) -> Tensor:
        probs: Tensor = self.model.head(batch).softmax(1)
        return probs


class ActsLate(Adapter):
    """Counts batches where nobody sees it, and answers otherwise after 20 of them."""

    sees = "features"

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.batches = 0

    def answer(self, batch: Tensor) -> Tensor:
        self.batches += 1
        logits: Tensor = self.model.head(batch)
        if self.batches > 20:
            logits = logits.flip(1)
        return logits.softmax(1)


class MovesLate(ActsLate):
    """Changes a tensor that it does not declare, after 20 batches; its answers stay the same."""

    late: Tensor

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.register_buffer("late", torch.zeros(1))

    def answer(self, batch: Tensor) -> Tensor:
        self.batches += 1
        if self.batches > 20:
            self.late += 1
        probs: Tensor = self.model.head(batch).softmax(1)
        return probs


class SeesPixels(Counting):
    sees = "pixels"  # type: ignore[assignment]


class NeedsHalfARow(Counting):
    least = 0.5  # type: ignore[assignment]


class AsksForLabels(Counting):
    def answer(self, batch: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return torch.nn.functional.one_hot(labels, 3).float()


class CentersInPlace(Counting):
    def answer(self, batch: Tensor) -> Tensor:
        batch -= batch.mean(0)
        return super().answer(batch)


class OverwritesTheSource(Counting):
    """Puts its queries in the place of source rows, which other methods are given, too."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.rows = source.features

    def answer(self, batch: Tensor) -> Tensor:
        self.rows[: len(batch)] = batch
        return super().answer(batch)


class CentersOnItsBatch(Adapter):
    """Says that every row is answered on its own, but subtracts the mean of the batch."""

    sees = "features"
    one_by_one = True

    def answer(self, batch: Tensor) -> Tensor:
        probs: Tensor = self.model.head(batch - batch.mean(0)).softmax(1)
        return probs


# These answer by the source model, or start from it at every batch.
NEVER_LEARN = {"source", "knn", "lame", "zero-shot", "stat-a", "bn-adapt", "ttaug", "memo", "ttt"}


@pytest.mark.no_cover
@pytest.mark.parametrize("name", sorted(ADAPTERS.keys() - NEVER_LEARN))
def test_every_method_has_learned_when_the_contract_saves_its_state(name: str) -> None:
    """NOTE and RoTTA learn from 64 images at a time; SAR learns from answers that are neither sure nor even."""
    adapter = ADAPTERS[name](toy_source(), **FEWER.get(name, {}))
    batches = long_stream(ADAPTERS[name])
    start = learned(adapter)
    states = []
    for number, batch in enumerate(batches[: max(CUTS)], start=1):
        torch.manual_seed(number)
        adapter.step(batch)
        if number in CUTS:
            states.append(learned(adapter))
    assert any(state != start for state in states)


def learned(adapter: Adapter) -> str:
    """The state as text, without the number of samples since the last reset, which every method counts."""
    state = dict(adapter.state_dict())
    state["_extra_state"] = {**state["_extra_state"], "since_reset": 0}
    tensors = {name: value.tolist() for name, value in state.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in state.items() if name not in tensors}
    return repr((tensors, others))


def test_a_method_that_keeps_the_contract_passes() -> None:
    check_adapter(Counting)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (SharesItsExtra, "predict changes"),
        (MovesInSecret, r"MovesInSecret moves \['count'\], which it does not declare"),
        (ForgetsItsExtra, "after reset the answers differ"),
        (CopiesEverything, r"predict copies \['model.encoder.*, which never change"),
        (DeclaresAndStays, "DeclaresAndStays declares count as moving, but none of them moves in 25 batches"),
        (ActsLate, "ActsLate: after reset the answers differ"),
        (MovesLate, r"MovesLate moves \['late'\], which it does not declare"),
        (PredictsSomethingElse, "predict does not answer as step would"),
        (SeesPixels, "SeesPixels: sees must be 'images' or 'features', got 'pixels'"),
        (NeedsHalfARow, "NeedsHalfARow: least must be a whole number of at least 1, got 0.5"),
        (
            AsksForLabels,
            "AsksForLabels.answer must take a batch and nothing else, never labels; it takes batch, labels",
        ),
        (CentersInPlace, "CentersInPlace changes the batches that it is given"),
        (OverwritesTheSource, "OverwritesTheSource changes its source: features"),
        (CentersOnItsBatch, "CentersOnItsBatch says that it answers one by one, but the rest of a batch changes"),
    ],
)
def test_a_method_that_breaks_the_contract_is_named(kind: type[Adapter], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_adapter(kind)


def test_a_method_that_overwrites_its_source_spoils_it_for_no_other_check() -> None:
    before = toy_source().features.clone()
    with pytest.raises(AssertionError):
        check_adapter(OverwritesTheSource)
    assert torch.equal(toy_source().features, before)


IMAGES = [name for name, kind in ADAPTERS.items() if kind.sees == "images"]


@pytest.mark.parametrize("name", IMAGES)
def test_methods_make_as_many_passes_as_they_say(name: str) -> None:
    """Images are counted at the BatchNorm of the toy model, three times where a gradient will flow back."""
    kind = ADAPTERS[name]
    adapter = kind(toy_source())
    passes = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal passes
        if isinstance(module, nn.BatchNorm2d):
            passes += len(output) * (3 if output.requires_grad else 1)

    batches = long_stream(kind)
    if kind.one_by_one:  # one image is enough, and more take long
        batches = [batches[0][:1]]
    hook = register_module_forward_hook(count)
    try:
        run(adapter, batches)
    finally:
        hook.remove()
    counted = passes / sum(map(len, batches))
    if kind.passes == 1:
        assert counted <= 8
    else:
        assert kind.passes / 2 <= counted <= kind.passes  # CoTTA looks at 32 views of batches that it doubts


def test_a_source_needs_no_rows_for_methods_without_a_bank() -> None:
    known = toy_source()
    batch = toy_stream(ADAPTERS["tent"], 1)[0]
    assert torch.equal(
        ADAPTERS["tent"](Source(known.model, lr=known.lr)).step(batch), ADAPTERS["tent"](known).step(batch)
    )


def test_a_plain_module_gets_a_pointer_to_what_splits_it() -> None:
    with pytest.raises(AdaNPCError, match=r"got a Linear: use SourceModel.of\(model, a_batch_of_inputs\)"):
        Source(torch.nn.Linear(3, 3))  # type: ignore[arg-type]
