"""Run a test-time method on a stream and measure how it did: one record for each method and batch size."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
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

TIMED = 5  # batches on which the encoder is timed


def adapt(
    scene: Scene, method: str, stream: Stream, size: int, settings: Mapping[str, Any] | None = None, seed: int = 0
) -> dict[str, Any]:
    """The record of running one method on one stream.

    Accuracies are in percent. Labels are used only to score answers, never to adapt. The fields that need explaining:

    * ``domains``: the accuracy on each domain. Each answer is scored as it was given, before later samples arrived.
    * ``source``: the accuracy on held-out source images before the stream and after each domain, averaged over source
      domains. The method answers these images but does not learn from them. NaN if no source image is here.
    * ``worst_tenth`` and ``calibration_error``: see the functions of the same names in ``quality``.
    * ``ood_auroc``: how well confidence, after the stream, separates held-out target images from the same images with
      their patches shuffled. None if no target images are held out.
    * ``joined``: how many rows joined the bank, and how many of them with a wrong label. None without a bank.
    * ``frozen``: the accuracy that the method would have had without learning. None if it does not report that.
    * ``prototypes``: true if no source sample was available and the bank began with one row per class.
    * ``scores``: what settings can be selected by, see ``selection.RULES``.
    * ``ms``: milliseconds per sample. Each sample counts an equal share of the time of its batch.

    Args:
        scene: model, targets and source.
        method: the name of a method, see ``adanpc.lab.adapt.find``.
        stream: the order of arrival.
        size: samples in a batch.
        settings: hyper-parameters that replace the method's defaults.
        seed: seeds the random draws of the method.
    """
    settings = dict(settings or {})
    method_class = find(method)
    check_settings(method, [method_class], settings, ("source",))
    adapter = method_class(scene.source, **settings)
    targets = [scene.seen(domain, adapter.sees) for domain in scene.targets]
    recalled = [scene.seen(domain, adapter.sees) for domain in scene.recalled]
    torch.manual_seed(seed_of(seed, method, size))
    before = recall(adapter, recalled, size)
    trace = answer_stream(adapter, targets, stream, size, method, lambda: recall(adapter, recalled, size))
    accuracy = _accuracy_by_domain(targets, trace)
    probs = torch.cat(trace.probs)
    labels = torch.cat([labels_of(targets, arrival) for arrival in trace.arrivals])
    right = probs.argmax(1) == labels
    times = torch.tensor(trace.times)
    return {
        "method": method,
        "settings": settings,
        "stream": stream.describe(),
        "batch_size": size,
        "domains": accuracy,
        "average": sum(accuracy.values()) / len(accuracy),
        "worst_tenth": worst_tenth(right),
        "calibration_error": calibration_error(probs, right),
        "ood_auroc": _ood_auroc(scene, adapter, size, len(trace.times)),
        "joined": _joined_counts(trace, labels),
        "frozen": _frozen_accuracy(trace, labels),
        "source": {"before": before, "after": trace.recalled, "images": sum(map(len, recalled))},
        "ms": {"p50": times.quantile(0.5).item(), "p99": times.quantile(0.99).item()},
        "encoder_ms": _encoder_ms(scene, adapter, size),
        "extra_bytes": extra_bytes(adapter),
        "samples": len(trace.times),
        "prototypes": scene.source.prototypes,
        "scores": _scores(scene, adapter, trace, size),
    }


def _accuracy_by_domain(targets: Sequence[Domain], trace: Trace) -> dict[str, float]:
    """The accuracy on each domain in percent; a domain without answers has none."""
    accuracy = {}
    for domain, marks in zip(targets, trace.right, strict=True):
        if marks:
            accuracy[domain.name] = 100 * sum(marks) / len(marks)
    return accuracy


def _ood_auroc(scene: Scene, adapter: Adapter, size: int, met: int) -> float | None:
    """How well a method's confidence separates target images from shuffled ones; None if there are none to compare.

    At most ``met`` images of each kind are used: as many as the stream had samples.
    """
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


def _joined_counts(trace: Trace, labels: Tensor) -> dict[str, int] | None:
    """How many samples joined the bank, and how many of those with a label other than their true one (n,)."""
    if not trace.joined:
        return None
    joined = torch.cat(trace.joined)
    has_joined = joined >= 0
    is_wrong = has_joined & (joined != labels)
    return {"rows": int(has_joined.sum()), "wrong": int(is_wrong.sum())}


def _frozen_accuracy(trace: Trace, labels: Tensor) -> float | None:
    """The accuracy, in percent, of the answers without adaptation, given the true labels (n,) of all samples."""
    if not trace.frozen:
        return None
    return 100 * (torch.cat(trace.frozen) == labels).double().mean().item()


def joined_labels(bank: MemoryBank, answer: Prediction) -> Tensor:
    """The label (B,) with which each sample of an answer has just joined the bank; -1 if it did not join."""
    table = bank.table("id", "label")
    places = torch.searchsorted(table["id"], answer.joined).clamp(max=len(table["id"]) - 1)
    held = table["id"][places] == answer.joined  # a method may have removed the row again
    return torch.where(held, table["label"][places], -1).cpu()


def _scores(scene: Scene, adapter: Adapter, trace: Trace, size: int) -> dict[str, float | None]:
    """The scores by which settings can be selected after the stream; see ``selection.RULES``."""
    held = [scene.seen(domain, adapter.sees) for domain in scene.held]
    on_held_out_target = None
    if held:
        on_held_out_target = recall(adapter, held, size)
    probs = torch.cat(trace.probs)
    return {
        "source": list(trace.recalled.values())[-1],
        "target": on_held_out_target,
        "snd": density(probs),
        "diversity": diversity(probs),
        "agreement": agreement(scene, trace),
    }


@dataclass(frozen=True)
class Trace:
    """What was measured along a stream, in order of arrival."""

    right: list[list[bool]]  # for each domain, whether each answer was right
    times: list[float] = field(default_factory=list)  # milliseconds per sample: its share of its batch
    recalled: dict[str, float] = field(default_factory=dict)  # accuracy on the source after each domain, or at the end
    arrivals: list[Arrival] = field(default_factory=list)  # the batches that were answered
    probs: list[Tensor] = field(default_factory=list)  # (B, C) the answer to each of them
    frozen: list[Tensor] = field(default_factory=list)  # (B,) answers without adaptation, if the method reports them
    joined: list[Tensor] = field(default_factory=list)  # see ``joined_labels``; empty for methods without a bank


def answer_stream(
    adapter: Adapter, targets: Sequence[Domain], stream: Stream, size: int, name: str, recall: Callable[[], float]
) -> Trace:
    """Answers a stream batch by batch, and tests on the source each time a domain is over.

    If the last batch of a domain is smaller than the method can handle, it is left unanswered.

    Args:
        adapter: the method.
        targets: the domains of the stream, as the method sees them.
        stream: the order of arrival.
        size: samples in a batch.
        name: the method's name, for the progress bar.
        recall: measures the current accuracy on the source.
    """
    trace = Trace([[] for _ in targets])
    arrivals = list(stream.batches(targets, size))
    places = [int(arrival.domains[0]) for arrival in arrivals]
    last_batch = {place: number for number, place in enumerate(places)}  # domain to the last batch with it
    progress = track(arrivals, f"{name}, batches of {size}")
    for number, arrival in enumerate(progress):
        place = places[number]
        enters = number == 0 or places[number - 1] != place
        ends = number + 1 == len(arrivals)
        leaves = last_batch[place] == number  # a domain may come back, so only its last batch counts
        if stream.resets and enters:
            adapter.reset()
        _answer_batch(adapter, targets, arrival, size, trace)
        marks = trace.right[place]
        accuracy = 100 * sum(marks) / max(len(marks), 1)
        progress.note(f"{targets[place].name}: {accuracy:.1f} %")
        if stream.mixes and ends:
            trace.recalled["mixed"] = recall()
        elif not stream.mixes and leaves:
            trace.recalled[targets[place].name] = recall()
    return trace


def _answer_batch(adapter: Adapter, targets: Sequence[Domain], arrival: Arrival, size: int, trace: Trace) -> None:
    """Answers one batch, and adds the answers and the time they took to the trace."""
    batch = fetch(targets, arrival)
    labels = labels_of(targets, arrival)
    start = time.perf_counter()
    try:
        probs = adapter.step(batch).cpu()
    except BatchError:
        if len(batch) == size:
            raise
        return  # a short batch at the end of a domain may be too small for a method
    ms_per_sample = 1000 * (time.perf_counter() - start) / len(batch)
    trace.times.extend([ms_per_sample] * len(batch))
    trace.arrivals.append(arrival)
    trace.probs.append(probs)
    if adapter.latest is not None:
        trace.joined.append(joined_labels(adapter.banks["bank"], adapter.latest))
        if adapter.latest.frozen is not None:
            trace.frozen.append(adapter.latest.frozen.argmax(1).cpu())
    marks = probs.argmax(1) == labels
    for place, mark in zip(arrival.domains.tolist(), marks.tolist(), strict=True):
        trace.right[place].append(mark)


def recall(adapter: Adapter, domains: Sequence[Domain], size: int) -> float:
    """The mean accuracy over domains, in percent; NaN if there are none.

    The method learns nothing: every batch meets the same state.
    """
    if not domains:
        return nan
    return sum(_accuracy(adapter, domain, size) for domain in domains) / len(domains)


def _accuracy(adapter: Adapter, domain: Domain, size: int) -> float:
    """The accuracy on a domain in percent; NaN if no batch is large enough for the method."""
    marks = [torch.zeros(0, dtype=torch.bool)]
    for rows in torch.arange(len(domain)).split(size):
        if len(rows) >= adapter.least:
            answers = adapter.predict(domain.take(rows)).argmax(1).cpu()
            marks.append(answers == domain.labels[rows])
    return 100 * torch.cat(marks).float().mean().item()


def agreement(scene: Scene, trace: Trace) -> float:
    """The percentage of answers that agree with the frozen vote of the source rows."""
    frozen = scene.frozen_vote
    targets = [scene.seen(domain, frozen.sees) for domain in scene.targets]
    same = []
    for arrival, probs in zip(trace.arrivals, trace.probs, strict=True):
        answers = frozen.step(fetch(targets, arrival)).argmax(1).cpu()
        same.append(answers == probs.argmax(1))
    return 100 * torch.cat(same).float().mean().item()


def _encoder_ms(scene: Scene, adapter: Adapter, size: int) -> float:
    """The value of ``encoder_ms``, measured once per scene; 0 if the time of the method already includes it."""
    if adapter.sees == "images":
        return 0.0
    if size not in scene.times:
        scene.times[size] = encoder_ms(scene, size)
    return scene.times[size]


def encoder_ms(scene: Scene, size: int) -> float:
    """Milliseconds per sample that the encoder takes in batches of this size: the median of a few batches."""
    times = []
    model = scene.source.model
    domain = scene.targets[0]
    batches = torch.arange(len(domain)).split(size)
    with torch.no_grad():
        for rows in batches[:TIMED]:
            images = domain.take(rows).to(model.device)
            start = time.perf_counter()
            model.features(images)
            times.append(1000 * (time.perf_counter() - start) / len(rows))
    return torch.tensor(times).median().item()


def extra_bytes(adapter: Adapter) -> int:
    """The bytes that a method holds beyond a copy of the model: banks, memories, optimizers."""
    return _bytes(adapter.state_dict()) - _bytes(adapter.model.state_dict())


def _bytes(value: Any) -> int:
    """The bytes of all tensors in a nested state."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(_bytes(each) for each in value.values())
    if isinstance(value, list | tuple):
        return sum(_bytes(each) for each in value)
    return 0
