"""Test-time methods on the stream of a trained run: one record for each method and batch size."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adanpc.core import MemoryBank, Prediction
from adanpc.lab.adapt import Adapter, BatchError, find
from adanpc.lab.data.domain import Domain
from adanpc.lab.data.streams import Arrival, Stream, fetch, labels_of
from adanpc.lab.seeds import seed_of
from adanpc.lab.settings import check_settings
from adanpc.lab.sweep.quality import auroc, calibration_error, worst_tenth
from adanpc.lab.sweep.scene import Scene
from adanpc.lab.sweep.selection import density, diversity
from adanpc.progress import track

TIMED = 5  # batches by which the encoder is timed


def adapt(
    scene: Scene, method: str, stream: Stream, size: int, settings: Mapping[str, Any] | None = None, seed: int = 0
) -> dict[str, Any]:
    """One method on one stream: the record.

    Accuracies are in percent. ``domains`` counts each answer as it was given, before anything was learned from later
    samples; labels are used for counting alone. ``source`` is the accuracy on held-out images, averaged over source
    domains, before the stream and after each domain; they are answered but not learned from. ``worst_tenth`` and
    ``calibration_error`` are those of ``quality``. ``ood_auroc`` is how well confidence tells held-out images of the
    targets from the same images with their patches in random order, after the stream; None if there are none.
    ``joined`` counts the rows that joined a bank, and those of them
    with a wrong label; ``frozen`` is the accuracy of the same method if it learned nothing; None where there is no
    bank, or no such answer. ``prototypes`` says that no source sample was known, only one row for each class.
    ``scores`` are what settings can be selected by, see ``selection.RULES``. Milliseconds are a sample's share of its
    batch.

    Args:
        scene: model, targets and source.
        method: by name, see ``adanpc.lab.adapt.find``.
        stream: the order of arrival.
        size: samples in a batch.
        settings: the method's hyper-parameters; by default its own defaults.
        seed: of what the method draws.
    """
    settings = dict(settings or {})
    method_class = find(method)
    check_settings(method, [method_class], settings, ("source",))
    adapter = method_class(scene.source, **settings)
    targets = [scene.seen(domain, adapter.sees) for domain in scene.targets]
    recalled = [scene.seen(domain, adapter.sees) for domain in scene.recalled]
    torch.manual_seed(seed_of(seed, method, size))
    before = recall(adapter, recalled, size)
    walk = follow(adapter, targets, stream, size, method, lambda: recall(adapter, recalled, size))
    accuracy = {}
    for domain, marks in zip(targets, walk.right, strict=True):
        if marks:
            accuracy[domain.name] = 100 * sum(marks) / len(marks)
    times = torch.tensor(walk.times)
    probs = torch.cat(walk.probs)
    labels = torch.cat([labels_of(targets, arrival) for arrival in walk.arrivals])
    right = probs.argmax(1) == labels
    return {
        "method": method,
        "settings": settings,
        "stream": stream.describe(),
        "batch_size": size,
        "domains": accuracy,
        "average": sum(accuracy.values()) / len(accuracy),
        "worst_tenth": worst_tenth(right),
        "calibration_error": calibration_error(probs, right),
        "ood_auroc": _ood_auroc(scene, adapter, size, len(walk.times)),
        "joined": _joined_counts(walk, labels),
        "frozen": _frozen_accuracy(walk, labels),
        "source": {"before": before, "after": walk.recalled, "images": sum(map(len, recalled))},
        "ms": {"p50": times.quantile(0.5).item(), "p99": times.quantile(0.99).item()},
        "encoder_ms": 0.0 if adapter.sees == "images" else _encoder_ms(scene, size),
        "extra_bytes": extra_bytes(adapter),
        "samples": len(walk.times),
        "prototypes": scene.source.prototypes,
        "scores": _scores(scene, adapter, walk, size),
    }


def _ood_auroc(scene: Scene, adapter: Adapter, size: int, met: int) -> float | None:
    """How well the confidence of a method tells images of the targets from strangers; no more than it has met."""
    if scene.strangers is None:
        return None
    confidences = []
    for domain in scene.strangers:
        seen = scene.seen(domain, adapter.sees)
        answers = [torch.zeros(0)]
        for rows in torch.arange(min(met, len(seen))).split(size):
            if len(rows) >= adapter.least:
                answers.append(adapter.predict(seen.take(rows)).amax(1).cpu())
        confidences.append(torch.cat(answers))
    native, foreign = confidences
    if len(native) == 0:
        return None
    return auroc(native, foreign)


def _joined_counts(walk: Walk, labels: Tensor) -> dict[str, int] | None:
    """How many samples joined the bank, and how many of them with another label than theirs (n,)."""
    if not walk.joined:
        return None
    joined = torch.cat(walk.joined)
    has_joined = joined >= 0
    return {"rows": int(has_joined.sum()), "wrong": int((has_joined & (joined != labels)).sum())}


def _frozen_accuracy(walk: Walk, labels: Tensor) -> float | None:
    """The accuracy of the answers without anything learned, in percent; labels are those of all samples (n,)."""
    if not walk.frozen:
        return None
    return 100 * (torch.cat(walk.frozen) == labels).double().mean().item()


def joined_labels(bank: MemoryBank, answer: Prediction) -> Tensor:
    """The label (B,) of the row that each sample of an answer became just now; -1 if it joined no bank."""
    table = bank.table("id", "label")
    places = torch.searchsorted(table["id"], answer.joined).clamp(max=len(table["id"]) - 1)
    held = table["id"][places] == answer.joined  # a method may have removed it again
    return torch.where(held, table["label"][places], -1).cpu()


def _scores(scene: Scene, adapter: Adapter, walk: Walk, size: int) -> dict[str, float | None]:
    """What settings can be selected by, after the stream; see ``selection.RULES``."""
    held = [scene.seen(domain, adapter.sees) for domain in scene.held]
    probs = torch.cat(walk.probs)
    return {
        "source": list(walk.recalled.values())[-1],
        "target": recall(adapter, held, size) if held else None,
        "snd": density(probs),
        "diversity": diversity(probs),
        "agreement": agreement(scene, walk),
    }


@dataclass(frozen=True)
class Walk:
    """What was seen along a stream."""

    right: list[list[bool]]  # for each domain, which answers were right, in order
    times: list[float] = field(default_factory=list)  # milliseconds of each sample: its share of its batch
    recalled: dict[str, float] = field(default_factory=dict)  # accuracy on the source after each domain, or at the end
    arrivals: list[Arrival] = field(default_factory=list)  # the batches that were answered
    probs: list[Tensor] = field(default_factory=list)  # and their answers
    frozen: list[Tensor] = field(
        default_factory=list
    )  # (B,) the answers without anything learned, where they are given
    joined: list[Tensor] = field(default_factory=list)  # as ``joined_labels`` has it, of methods with a bank


def follow(
    adapter: Adapter, targets: Sequence[Domain], stream: Stream, size: int, name: str, recall: Callable[[], float]
) -> Walk:
    """Answers a stream batch by batch, and comes back to the source whenever a domain has come for the last time.

    The last samples of a domain stay unanswered if they are fewer than a method can use.

    Args:
        adapter: the method.
        targets: the domains of the stream, as the method sees them.
        stream: the order of arrival.
        size: samples in a batch.
        name: of the method, for the progress bar.
        recall: the accuracy on the source right now.
    """
    walk = Walk([[] for _ in targets])
    arrivals = list(stream.batches(targets, size))
    places = [int(arrival.domains[0]) for arrival in arrivals]
    last_batch = {place: number for number, place in enumerate(places)}  # of each domain
    progress = track(arrivals, f"{name}, batches of {size}")
    for number, arrival in enumerate(progress):
        place = places[number]
        enters = number == 0 or places[number - 1] != place
        ends = number + 1 == len(arrivals)
        leaves = last_batch[place] == number  # for good: a domain may come back
        if stream.resets and enters:
            adapter.reset()
        _answer(adapter, targets, arrival, size, walk)
        marks = walk.right[place]
        progress.note(f"{targets[place].name}: {100 * sum(marks) / max(len(marks), 1):.1f} %")
        if stream.mixes and ends:
            walk.recalled["mixed"] = recall()
        elif not stream.mixes and leaves:
            walk.recalled[targets[place].name] = recall()
    return walk


def _answer(adapter: Adapter, targets: Sequence[Domain], arrival: Arrival, size: int, walk: Walk) -> None:
    """One batch: what was right, and how long it took."""
    batch = fetch(targets, arrival)
    labels = labels_of(targets, arrival)
    start = time.perf_counter()
    try:
        probs = adapter.step(batch).cpu()
    except BatchError:
        if len(batch) == size:
            raise
        return  # what is left over at the end of a domain may be too little for a method
    each = 1000 * (time.perf_counter() - start) / len(batch)
    walk.times.extend([each] * len(batch))
    walk.arrivals.append(arrival)
    walk.probs.append(probs)
    if adapter.latest is not None:
        walk.joined.append(joined_labels(adapter.banks["bank"], adapter.latest))
        if adapter.latest.frozen is not None:
            walk.frozen.append(adapter.latest.frozen.argmax(1).cpu())
    marks = probs.argmax(1) == labels
    for place, mark in zip(arrival.domains.tolist(), marks.tolist(), strict=True):
        walk.right[place].append(mark)


def recall(adapter: Adapter, domains: Sequence[Domain], size: int) -> float:
    """The mean accuracy on domains in percent, answered in batches from the same state each."""
    return sum(_accuracy(adapter, domain, size) for domain in domains) / len(domains)


def _accuracy(adapter: Adapter, domain: Domain, size: int) -> float:
    """In percent; NaN if no batch is large enough for the method."""
    marks = [torch.zeros(0, dtype=torch.bool)]
    for rows in torch.arange(len(domain)).split(size):
        if len(rows) >= adapter.least:
            answers = adapter.predict(domain.take(rows)).argmax(1).cpu()
            marks.append(answers == domain.labels[rows])
    return 100 * torch.cat(marks).float().mean().item()


def agreement(scene: Scene, walk: Walk) -> float:
    """How many answers are those of the frozen vote of source rows, in percent."""
    frozen = scene.frozen_vote
    targets = [scene.seen(domain, frozen.sees) for domain in scene.targets]
    same = []
    for arrival, probs in zip(walk.arrivals, walk.probs, strict=True):
        answers = frozen.step(fetch(targets, arrival)).argmax(1).cpu()
        same.append(answers == probs.argmax(1))
    return 100 * torch.cat(same).float().mean().item()


def _encoder_ms(scene: Scene, size: int) -> float:
    """As ``encoder_ms``, measured once for a scene."""
    if size not in scene.times:
        scene.times[size] = encoder_ms(scene, size)
    return scene.times[size]


def encoder_ms(scene: Scene, size: int) -> float:
    """Milliseconds that the encoder takes for a sample in a batch of this size: the median of a few."""
    times = []
    model = scene.source.model
    domain = scene.recalled[0]
    batches = torch.arange(len(domain)).split(size)
    with torch.no_grad():
        for rows in batches[:TIMED]:
            images = domain.take(rows).to(model.device)
            start = time.perf_counter()
            model.features(images)
            times.append(1000 * (time.perf_counter() - start) / len(rows))
    return torch.tensor(times).median().item()


def extra_bytes(adapter: Adapter) -> int:
    """What the method holds beyond a copy of the model: banks, memories, optimizers."""
    return _bytes(adapter.state_dict()) - _bytes(adapter.model.state_dict())


def _bytes(value: Any) -> int:
    """The bytes of all tensors in a state."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(_bytes(each) for each in value.values())
    if isinstance(value, list | tuple):
        return sum(_bytes(each) for each in value)
    return 0
