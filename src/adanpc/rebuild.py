"""New classifiers from the rows of existing ones: with another capacity, more classes, fewer rows, or the rows of two.

These are functions rather than changes, because they alter a bank's settings. Each returns a new classifier and leaves
the given ones as they are.
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
    """The same classifier with another capacity, or without one.

    Args:
        thing: a classifier or a wrapped model.
        capacity: the most admitted rows that may vote. If there are more, some leave, as the bank's ``evict`` decides.
    """
    if capacity is not None:
        capacity = require.whole("capacity", capacity, least=1, most=LARGEST)
    state = _classifier_of(thing).state()
    state["document"]["bank"]["capacity"] = capacity
    return _rebuilt(thing, _within_capacity(state))


@require.names_its_arguments
def with_classes(thing: Thing, classes: int | Sequence[str]) -> Thing:
    """The same classifier with more classes, or with names for the classes that it has. Rows keep their labels.

    Args:
        thing: a classifier or a wrapped model.
        classes: the number of classes, or the names of all of them, beginning with those that the bank has.
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
    """A classifier with the rows of both, and with the settings and the stream of the first.

    Rows of the second get new ids, in the same order, after those of the first. Source rows that both hold are kept
    once, so that two copies of a bank that learned from different streams become one. Judgments and deletions in the
    second concern its own rows only. If there are more admitted rows than the capacity of the first, some leave, as
    from a full bank.

    Args:
        thing: a classifier or a wrapped model.
        other: another one with the same classes, dimensions, storage, kind of labels and preset. With the preset
            "paper", neither may use centering; with "safe", both must have begun with the same source rows. Wrapped
            models must have the same weights, layer and preprocessing.
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
        if name == "id":
            column = column + first_id
        ours = columns[name]
        columns[name] = torch.cat([ours, column.to(ours.device)])
    added_document = added["document"]
    document["judgments"] += [[first_id + row, history] for row, history in added_document["judgments"]]
    document["deleted"] += [first_id + row for row in added_document["deleted"]]
    document["next_id"] += added_document["next_id"]
    document["position"] += added_document["position"]
    return _rebuilt(thing, _within_capacity(state))


@require.names_its_arguments
def reduced(thing: Thing, share: float) -> Thing:
    """The same classifier with a share of its source rows.

    The rows that stay are drawn at random, with a fixed seed, and in the same proportion from each class in each
    domain. Rows that were admitted, added by an expert or judged by anybody all stay, and so does the feature
    transform that was fitted to all rows.

    Args:
        thing: a classifier or a wrapped model.
        share: the share of the source rows that stays, more than 0 and at most 1; at least one row of each class in
            each domain.
    """
    share = require.between("share", share, 0, 1)
    if share == 0:
        raise AdaNPCError("share must be more than 0, got 0: a classifier without source rows answers nothing")
    state = _classifier_of(thing).state()
    table = state["tensors"]
    ids = table["id"].cpu()
    judged = torch.tensor([row for row, _ in state["document"]["judgments"]], dtype=torch.int64)
    is_source = table["origin"].cpu() == Origin.SOURCE
    may_leave = is_source & ~torch.isin(ids, judged)
    strata = torch.stack([table["label"], table["domain"]], 1).cpu()  # (n, 2)
    # Rows that cover the others best, chosen greedily or by herding, answer no better; see docs/results.md.
    generator = torch.Generator().manual_seed(0)
    leaving: list[int] = []
    for stratum in strata[may_leave].unique(dim=0):
        in_stratum = (strata == stratum).all(1)
        members = ids[may_leave & in_stratum]
        shuffled = members[torch.randperm(len(members), generator=generator)]
        staying = ceil(share * len(members))
        leaving += shuffled[staying:].tolist()
    return _rebuilt(thing, _without(state, leaving))


def _check_alike(one: AdaNPC, two: AdaNPC) -> None:
    """Raises an error if the rows of two classifiers cannot be put into one bank."""
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
    """Raises an error if two banks of the preset "safe" have different transforms, so that rows are not comparable."""
    ours = one.state()["tensors"]
    theirs = two.state()["tensors"]
    for part in TRANSFORM:
        name = PREFIX_OF_TRANSFORM + part
        known = name in ours and name in theirs
        if not known or not torch.equal(ours[name].cpu(), theirs[name].cpu()):
            raise AdaNPCError(
                "banks of the preset 'safe' can be merged only if they began with the same source rows, to which their "
                "features are fitted: learn the features of both in one classifier"
            )


def _known_source_rows(state: State, added: State) -> list[int]:
    """The ids of the source rows in ``added`` that ``state`` holds as well, and that nobody has judged."""
    known = set(_hashes_of_source_rows(state).values())
    judged = {row for row, _ in added["document"]["judgments"]}
    hashes = _hashes_of_source_rows(added)
    return [row for row, digest in hashes.items() if digest in known and row not in judged]


def _hashes_of_source_rows(state: State) -> dict[int, bytes]:
    """For each source row, by id, a hash of everything that is stored of it except its id."""
    table = state["tensors"]
    source = (table["origin"] == Origin.SOURCE).cpu()
    columns = []
    for name, column in sorted(table.items()):
        if name not in (*BESIDE_ROWS, "id"):
            columns.append(column.cpu()[source].contiguous())
    hashes = {}
    for place, row in enumerate(table["id"].cpu()[source].tolist()):
        hasher = hashlib.blake2b(digest_size=16)
        for column in columns:
            hasher.update(column[place].numpy().tobytes())
        hashes[row] = hasher.digest()
    return hashes


def _within_capacity(state: State) -> State:
    """The state without the admitted rows that exceed its capacity."""
    settings = state["document"]["bank"]
    if settings["capacity"] is None:
        return state
    table = state["tensors"]
    queue = Eviction(settings["evict"], settings["capacity"], settings["seed"])
    counted = (table["origin"] == Origin.ADMITTED) & (table["state"] == ACTIVE)
    ids = table["id"][counted].tolist()
    labels = table["label"][counted].tolist()
    for row, label in zip(ids, labels, strict=True):
        queue.add(row, label)
    return _without(state, queue.overflow(protected=()))


def _without(state: State, leaving: Collection[int]) -> State:
    """The state without the rows with these ids, and without judgments on them."""
    ids = state["tensors"]["id"]
    leaving_ids = torch.tensor(list(leaving), dtype=torch.int64, device=ids.device)
    stays = ~torch.isin(ids, leaving_ids)
    tensors: dict[str, Tensor] = {}
    for name, tensor in state["tensors"].items():
        if name not in BESIDE_ROWS:
            tensor = tensor[stays]
        tensors[name] = tensor
    gone = set(leaving)
    document = dict(state["document"])
    document["judgments"] = [entry for entry in document["judgments"] if entry[0] not in gone]
    return {"document": document, "tensors": tensors}


def _classifier_of(thing: Any) -> AdaNPC:
    """The classifier itself, or that of a wrapped model."""
    if isinstance(thing, Wrapped):
        return thing.classifier
    if not isinstance(thing, AdaNPC):
        raise AdaNPCError(f"expected an AdaNPC or a wrapped model, got {type(thing).__name__}")
    return thing


def _rebuilt(thing: Thing, state: State) -> Thing:
    """A classifier with this state; wrapped, if a wrapped model was given."""
    classifier = AdaNPC.load(state, device=_classifier_of(thing).bank.device)
    if isinstance(thing, Wrapped):
        return cast(Thing, thing.with_classifier(classifier))
    return cast(Thing, classifier)
