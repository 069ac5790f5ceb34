"""Builds what a spec describes: data split into parts, a model, and an algorithm."""

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
from adanpc.require import did_you_mean, one_of

FILE_OF = {"best": BEST, "last": CHECKPOINT}  # the file in a run that holds this model


class Split(NamedTuple):
    """A domain and its two parts: four fifths to train or test on, one fifth for model selection."""

    whole: Domain
    large: Domain
    small: Domain


class Prepared(NamedTuple):
    """All that a new run needs, read, built and checked, so that nothing has to be read or built again.

    Args:
        spec: the complete spec.
        data: the data set as it was read.
        description: what the run's ``spec.json`` says about the data.
        algorithm: the algorithm with initial weights.
    """

    spec: Spec
    data: DataSet
    description: dict[str, Any]
    algorithm: Algorithm


def start(spec: Spec, data_dir: Path, folder: Path) -> Run:
    """Creates a new run in a folder, checked against its data; nothing is trained yet."""
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
    """Returns all that a run of this spec needs; refuses a spec that cannot be trained, and writes nothing.

    Args:
        spec: complete or not.
        data_dir: the folder with the data set.
        device: where the model is trained.
        data: the data set, if it has already been read.
        skip_unreadable: whether to decode every image first and leave out those that cannot be decoded; the run
            remembers which.
    """
    spec = spec.complete()
    if data is None:
        data = read(spec.data, data_dir, seed=spec.seed, missing_ok=skip_unreadable)
    _check_targets(spec, data)  # before every image is decoded, which may take long
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
    """Returns the algorithm of a run before its first step.

    Args:
        run: the run.
        device: where the model is trained.
        fresh: whether to load pretrained weights or the spec's file of weights; without them the algorithm is only good
            for restoring a checkpoint.
    """
    return _build(run.spec, run.data, device, fresh)


def load_algorithm(run: Run, which: str = "best") -> Algorithm:
    """Returns the trained algorithm of a run, in evaluation mode; test-time methods take its ``model``.

    Args:
        run: a run that has been evaluated at least once.
        which: ``best``, by accuracy on the held-out parts of the source domains, or ``last``.
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
    """Returns the name of the file in a run that holds its best or its last model."""
    one_of("which", which, FILE_OF)
    return FILE_OF[which]


def splits(run: Run, transform: Transform | None, data: DataSet | None = None) -> dict[str, Split]:
    """Returns the two parts of every domain of a run, by name; refuses data that the run was not created on.

    Args:
        run: the run, whose seed decides the split.
        transform: the transform of all domains.
        data: the run's data set, if it has already been read.
    """
    if data is None:
        folder = Path(run.data["folder"])
        skipped = run.data["skipped"]
        data = read(run.spec.data, folder, seed=run.spec.seed, missing_ok=bool(skipped))
        if skipped:
            files = [os.path.normpath(folder / name) for name in skipped]
            data = without(data, files, UNREADABLE)
    _check_unchanged(run, data)
    parts = {}
    for domain in data.domains:
        whole = some(domain, run.spec.images, run.spec.seed).with_transform(transform)
        large, small = split(whole, run.spec.seed)
        parts[domain.name] = Split(whole, large, small)
    return parts


def _below(folder: Path, files: Collection[str]) -> list[str]:
    """Returns the paths of files relative to a folder, which stay valid if the folder gets another name."""
    start = os.path.abspath(folder)
    return [os.path.relpath(os.path.abspath(file), start) for file in files]


def _check_targets(spec: Spec, data: DataSet) -> None:
    """Refuses targets that the data set does not have, or that leave nothing to train on."""
    names = [domain.name for domain in data.domains]
    for target in spec.targets:
        if target not in names:
            hint = did_you_mean(target, names)
            raise DataError(f"{data.name} has no domain {target!r}; it has: {', '.join(names)}{hint}")
    if set(names) == set(spec.targets):
        raise AdaNPCError("no source domain is left: name fewer targets")


def _describe(data: DataSet) -> dict[str, Any]:
    """Returns what a run remembers about its data, to recognize them later."""
    return {
        "channels": len(data.domains[0].images[0]),
        "classes": list(data.classes),
        "domains": {domain.name: len(domain) for domain in data.domains},
        "digest": data.digest(),
    }


def _check_unchanged(run: Run, data: DataSet) -> None:
    """Refuses data that differ in anything, down to the last pixel, from those the run was created on."""
    for name, value in _describe(data).items():
        if value != run.data[name]:
            raise RunError(
                f"the data in {run.data['folder']} has changed since {run.folder} was created: "
                f"its {name} was {run.data[name]} and is {value}; restore the data, or train again in another folder"
            )


def _build(spec: Spec, data: Mapping[str, Any], device: torch.device | str, fresh: bool) -> Algorithm:
    """Returns the algorithm of a spec on data of this description; see ``assemble``."""
    sources = [name for name in data["domains"] if name not in spec.targets]
    weights = None
    if fresh and spec.weights:
        weights = Path(spec.weights)
    with torch.random.fork_rng():  # the caller's random numbers go on as if nothing had been drawn
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
