"""Other classifiers made of the rows of existing ones: another capacity, more classes, fewer rows, or those of two.

These are no changes of a bank, since they alter its settings. Each returns a new classifier and leaves the given ones
as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from math import ceil
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from adanpc import require
from adanpc.core import AdaNPC, Origin, PaperSettings, State
from adanpc.core.codec import PREFIX_OF_TRANSFORM, TRANSFORM
from adanpc.core.contents import BESIDE_ROWS, LARGEST, class_names
from adanpc.core.eviction import Eviction
from adanpc.core.guard import with_more_classes
from adanpc.core.table import ACTIVE
from adanpc.errors import AdaNPCError, LabelError
from adanpc.models import Wrapped

Thing = TypeVar("Thing", bound=AdaNPC | Wrapped)


@require.names_its_arguments
def with_capacity(thing: Thing, capacity: int | None) -> Thing:
    """The same classifier with another capacity, or without one; rows that no longer fit have left.

    Args:
        thing: a classifier or a wrapped model.
        capacity: the most admitted rows that may vote. Those beyond leave in the order of the bank's ``evict``.
    """
    if capacity is not None:
        capacity = require.whole("capacity", capacity, least=1, most=LARGEST)
    state = _classifier_of(thing).state()
    state["document"]["bank"]["capacity"] = capacity
    return _rebuilt(thing, _within_capacity(state))


@require.names_its_arguments
def with_classes(thing: Thing, classes: int | Sequence[str]) -> Thing:
    """The same classifier with more classes, or with names for those that it has. Rows keep their labels.

    Args:
        thing: a classifier or a wrapped model.
        classes: how many, or the names of all; those that there are keep their names and their places.
    """
    settings = _classifier_of(thing).bank.settings
    names = class_names(classes)
    count = len(names) or require.whole("classes", classes, least=1)
    if count < settings.classes:
        raise LabelError(f"classes must be at least {settings.classes}, as many as the bank has, got {count}")
    if names[: settings.classes] != settings.names and settings.names:
        raise LabelError(f"classes must begin with the names that the bank has, {list(settings.names)}, got {classes}")
    state = _classifier_of(thing).state()
    state["document"]["bank"]["classes"] = list(names) or count
    tensors = state["tensors"]
    if settings.soft:
        tensors["soft"] = pad(tensors["soft"], (0, count - settings.classes))
    if "stream" in tensors:
        tensors["stream"] = with_more_classes(tensors["stream"], settings.dim, settings.classes, count)
    return _rebuilt(thing, state)


@require.names_its_arguments
def merged(thing: Thing, other: Thing) -> Thing:
    """A classifier with the rows of both, and the settings and the stream of the first.

    Rows of the second get new ids, in the same order, after those of the first. Source rows that both hold are kept
    once, so that two copies of a bank that learned from different streams become one. What people decided about rows of
    the second, or deleted there, concerns those rows only. If more rows were admitted than the first has room for, some
    leave, as from a full bank.

    Args:
        thing: a classifier or a wrapped model.
        other: of the same kind: with the same classes, dimensions, storage, kind of labels and preset, and without
            centering; with the preset "safe", one that began with the same source rows; a wrapped model with the same
            weights, layer and preprocessing.
    """
    if isinstance(thing, Wrapped) and isinstance(other, Wrapped):
        thing.check(other.recipe)
    one = _classifier_of(thing)
    two = _classifier_of(other)
    _check_alike(one, two)
    state = one.state()
    added = two.state()
    added = _without(added, _known_source_rows(state, added))
    document = state["document"]
    first_id = document["next_id"]
    columns = state["tensors"]
    for name, column in added["tensors"].items():
        if name in BESIDE_ROWS:
            continue
        moved = column + first_id if name == "id" else column
        columns[name] = torch.cat([columns[name], moved.to(columns[name].device)])
    document["judgments"] += [[first_id + row, history] for row, history in added["document"]["judgments"]]
    document["deleted"] += [first_id + row for row in added["document"]["deleted"]]
    document["next_id"] += added["document"]["next_id"]
    document["position"] += added["document"]["position"]
    return _rebuilt(thing, _within_capacity(state))


@require.names_its_arguments
def reduced(thing: Thing, share: float) -> Thing:
    """The same classifier with a share of its source rows.

    Of each class in each domain the same share stays, drawn at random, always the same. Rows that were admitted, that
    an expert added or that somebody has judged all stay, and so does the feature transform that was fitted to all rows.

    Args:
        thing: a classifier or a wrapped model.
        share: of the source rows that stay, more than 0 and at most 1. Of each class and domain, one row at least.
    """
    share = require.between("share", share, 0, 1)
    if share == 0:
        raise AdaNPCError("share must be more than 0, got 0: a classifier without source rows answers nothing")
    state = _classifier_of(thing).state()
    ids = state["tensors"]["id"].cpu()
    judged = torch.tensor([row for row, _ in state["document"]["judgments"]], dtype=torch.int64)
    is_source = state["tensors"]["origin"].cpu() == Origin.SOURCE
    may_leave = is_source & ~torch.isin(ids, judged)
    kinds = torch.stack([state["tensors"]["label"], state["tensors"]["domain"]], 1).cpu()
    # Rows that cover the others best, chosen greedily or by herding, answer no better; see docs/results.md.
    generator = torch.Generator().manual_seed(0)
    leaving: list[int] = []
    for kind in kinds[may_leave].unique(dim=0):
        members = ids[may_leave & (kinds == kind).all(1)]
        order = torch.randperm(len(members), generator=generator)
        stays = ceil(share * len(members))
        leaving += members[order[stays:]].tolist()
    return _rebuilt(thing, _without(state, leaving))


def _check_alike(one: AdaNPC, two: AdaNPC) -> None:
    for name in ("dim", "classes", "names", "storage", "soft"):
        ours = getattr(one.bank.settings, name)
        theirs = getattr(two.bank.settings, name)
        if ours != theirs:
            raise AdaNPCError(f"banks that are merged must have the same {name}, got {ours!r} and {theirs!r}")
    if one.preset != two.preset:
        raise AdaNPCError(f"banks that are merged must have the same preset, got {one.preset!r} and {two.preset!r}")
    if one.preset == "safe":
        _check_same_transform(one, two)
        return
    for settings in (one.settings, two.settings):
        if isinstance(settings, PaperSettings) and settings.centering.mode != "none":
            mode = settings.centering.mode
            raise AdaNPCError(
                f"banks with centering ({mode!r}) cannot be merged, since they subtracted different means: "
                "learn the features of both in one classifier"
            )


def _check_same_transform(one: AdaNPC, two: AdaNPC) -> None:
    """Refuses banks of the preset "safe" whose features are not comparable."""
    ours = one.state()["tensors"]
    theirs = two.state()["tensors"]
    for name in (PREFIX_OF_TRANSFORM + part for part in TRANSFORM):
        known = name in ours and name in theirs
        if not known or not torch.equal(ours[name].cpu(), theirs[name].cpu()):
            raise AdaNPCError(
                "banks of the preset 'safe' can be merged only if they began with the same source rows, to which their "
                "features are fitted: learn the features of both in one classifier"
            )


def _known_source_rows(state: State, added: State) -> list[int]:
    """The ids of source rows of the second state that the first holds, too, and that nobody has judged."""
    known = set(_source_rows(state).values())
    judged = {row for row, _ in added["document"]["judgments"]}
    return [row for row, contents in _source_rows(added).items() if contents in known and row not in judged]


def _source_rows(state: State) -> dict[int, bytes]:
    """A hash of all that is stored of each source row but its id, by id."""
    table = state["tensors"]
    source = (table["origin"] == Origin.SOURCE).cpu()
    columns = []
    for name, column in sorted(table.items()):
        if name not in (*BESIDE_ROWS, "id"):
            columns.append(column.cpu()[source].contiguous())
    hashes = {}
    for place, row in enumerate(table["id"].cpu()[source].tolist()):
        total = hashlib.blake2b(digest_size=16)
        for column in columns:
            total.update(column[place].numpy().tobytes())
        hashes[row] = total.digest()
    return hashes


def _within_capacity(state: State) -> State:
    """The state without the admitted rows that leave until the capacity is kept."""
    settings = state["document"]["bank"]
    if settings["capacity"] is None:
        return state
    table = state["tensors"]
    queue = Eviction(settings["evict"], settings["capacity"], settings["seed"])
    counted = (table["origin"] == Origin.ADMITTED) & (table["state"] == ACTIVE)
    for row, label in zip(table["id"][counted].tolist(), table["label"][counted].tolist(), strict=True):
        queue.add(row, label)
    return _without(state, queue.overflow(()))


def _without(state: State, leaving: Collection[int]) -> State:
    """The state without these rows."""
    ids = state["tensors"]["id"]
    stay = ~torch.isin(ids, torch.tensor(list(leaving), dtype=torch.int64, device=ids.device))
    tensors: dict[str, Tensor] = {}
    for name, tensor in state["tensors"].items():
        tensors[name] = tensor if name in BESIDE_ROWS else tensor[stay]
    gone = set(leaving)
    document = dict(state["document"])
    document["judgments"] = [entry for entry in document["judgments"] if entry[0] not in gone]
    return {"document": document, "tensors": tensors}


def _classifier_of(thing: Any) -> AdaNPC:
    if isinstance(thing, Wrapped):
        return thing.classifier
    if not isinstance(thing, AdaNPC):
        raise AdaNPCError(f"expected an AdaNPC or a wrapped model, got {type(thing).__name__}")
    return thing


def _rebuilt(thing: Thing, state: State) -> Thing:
    """What was given, with a classifier of this state."""
    classifier = AdaNPC.load(state, device=_classifier_of(thing).bank.device)
    if isinstance(thing, Wrapped):
        return cast(Thing, thing.with_classifier(classifier))
    return cast(Thing, classifier)
