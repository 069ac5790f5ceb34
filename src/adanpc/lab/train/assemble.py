"""From a spec to what is trained: data in parts, a model, an algorithm."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adanpc.errors import AdaNPCError
from adanpc.lab.data.domain import DataError, DataSet, Domain, Transform, some, split
from adanpc.lab.data.images import UNREADABLE, unreadable, without
from adanpc.lab.data.read import read
from adanpc.lab.networks.encoders import build
from adanpc.lab.seeds import seed_of
from adanpc.lab.train.algorithm import Algorithm
from adanpc.lab.train.registry import known
from adanpc.lab.train.run import BEST, CHECKPOINT, Run, RunError, check_vacant
from adanpc.lab.train.spec import Spec
from adanpc.require import did_you_mean


class Split(NamedTuple):
    """A domain, and its two parts: four fifths to train or test on, one fifth to select by."""

    whole: Domain
    large: Domain
    small: Domain


class Prepared(NamedTuple):
    """What a new run is made of, checked: nothing of it needs to be read or built again.

    Args:
        spec: complete.
        data: as it was read.
        description: of the data, for the run's ``spec.json``.
        algorithm: with the initial weights.
    """

    spec: Spec
    data: DataSet
    description: dict[str, Any]
    algorithm: Algorithm


def start(spec: Spec, data_dir: Path, folder: Path) -> Run:
    """A new run in a folder, checked against its data; nothing is trained yet."""
    check_vacant(folder)
    prepared = prepare(spec, data_dir)
    return Run.create(folder, prepared.spec, prepared.description)


def prepare(
    spec: Spec,
    data_dir: Path,
    device: torch.device | str = "cpu",
    data: DataSet | None = None,
    *,
    skip_unreadable: bool = False,
) -> Prepared:
    """What a run of this spec starts from; refuses what cannot be trained, and writes nothing.

    Args:
        spec: complete or not.
        data_dir: holds the data set.
        device: where the model is trained.
        data: the data set, if it has been read already.
        skip_unreadable: decodes every image first, and leaves out those that cannot be; the run remembers which.
    """
    spec = spec.complete()
    if data is None:
        data = read(spec.data, data_dir, seed=spec.seed, missing_ok=skip_unreadable)
    _check_targets(spec, data)
    skipped: tuple[str, ...] = ()
    if skip_unreadable:
        skipped = unreadable(data)
        data = without(data, skipped, UNREADABLE)
    description = {
        "folder": str(data_dir.resolve()),
        **_describe(data),
        "notice": data.notice,
        "skipped": _below(data_dir, skipped),
    }
    algorithm = _build(spec, description, device, fresh=True)
    return Prepared(spec, data, description, algorithm)


def assemble(run: Run, device: torch.device | str = "cpu", *, fresh: bool = False) -> Algorithm:
    """The algorithm of a run at its first step; with the initial weights only if ``fresh``."""
    return _build(run.spec, run.data, device, fresh)


def load_algorithm(run: Run, which: str = "best") -> Algorithm:
    """The algorithm of a run as it was trained, in evaluation mode; its ``model`` is what test-time methods take.

    Args:
        run: that has been evaluated at least once.
        which: ``best`` by accuracy on the held-out parts of the source domains, or ``last``.
    """
    name = model_file(which)
    state = run.state(name)
    if state is None:
        raise RunError(f"{run.folder} has no {which} model yet: resume its training until it has been evaluated")
    algorithm = assemble(run)
    with run.restoring(name):
        algorithm.restore(state["algorithm"])
    return algorithm.eval()


def model_file(which: str) -> str:
    """The name of the file in a run that holds its best or its last model."""
    if which not in ("best", "last"):
        raise AdaNPCError(f"which must be 'best' or 'last', got {which!r}")
    return BEST if which == "best" else CHECKPOINT


def splits(run: Run, transform: Transform | None, data: DataSet | None = None) -> dict[str, Split]:
    """Every domain of the run's data in its two parts; refuses data other than the run was created on.

    Args:
        run: whose seed decides the split.
        transform: given to all domains.
        data: the run's data set, if it has been read already.
    """
    if data is None:
        folder = Path(run.data["folder"])
        skipped = run.data["skipped"]
        data = read(run.spec.data, folder, seed=run.spec.seed, missing_ok=bool(skipped))
        if skipped:
            data = without(data, [os.path.normpath(folder / name) for name in skipped], UNREADABLE)
    _check_unchanged(run, data)
    parts = {}
    for domain in data.domains:
        whole = some(domain, run.spec.images, run.spec.seed).with_transform(transform)
        large, small = split(whole, run.spec.seed)
        parts[domain.name] = Split(whole, large, small)
    return parts


def _below(folder: Path, files: Collection[str]) -> list[str]:
    """The paths of files below a folder, which say the same after the folder was reached by another name."""
    return [os.path.relpath(os.path.abspath(file), os.path.abspath(folder)) for file in files]


def _check_targets(spec: Spec, data: DataSet) -> None:
    """Refuses targets that the data does not have, or that leave nothing to train on."""
    names = [domain.name for domain in data.domains]
    for target in spec.targets:
        if target not in names:
            hint = did_you_mean(target, names)
            raise DataError(f"{data.name} has no domain {target!r}; it has: {', '.join(names)}{hint}")
    if set(names) == set(spec.targets):
        raise AdaNPCError("no source domain is left: name fewer targets")


def _describe(data: DataSet) -> dict[str, Any]:
    """What a run remembers of its data, to recognize it by."""
    return {
        "channels": len(data.domains[0].images[0]),
        "classes": list(data.classes),
        "domains": {domain.name: len(domain) for domain in data.domains},
        "digest": data.digest(),
    }


def _check_unchanged(run: Run, data: DataSet) -> None:
    """Refuses data that is not what the run was created on, to the last pixel."""
    for name, value in _describe(data).items():
        if value != run.data[name]:
            raise RunError(
                f"the data in {run.data['folder']} has changed since {run.folder} was created: "
                f"its {name} was {run.data[name]} and is {value}; restore the data, or train again in another folder"
            )


def _build(spec: Spec, data: Mapping[str, Any], device: torch.device | str, fresh: bool) -> Algorithm:
    sources = [name for name in data["domains"] if name not in spec.targets]
    weights = None
    if fresh and spec.weights:
        weights = Path(spec.weights)
    with torch.random.fork_rng():
        torch.manual_seed(seed_of(spec.seed, "weights"))
        model = build(
            spec.encoder,
            len(data["classes"]),
            channels=data["channels"],
            pretrained=fresh and bool(spec.pretrained),
            weights=weights,
            norm=spec.norm,
            dropout=spec.dropout,
            frozen_batchnorm=spec.frozen_batchnorm,
            straight_resize=spec.straight_resize,
        )
        algorithm = known(spec.algorithm)(model.to(device), len(sources), **spec.hyper)
        return algorithm.to(device)
