"""From a spec to what is trained: data in parts, a model, an algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adanpc.errors import AdaNPCError
from adanpc.lab.data.domain import Domain, Transform, some, split
from adanpc.lab.data.read import read
from adanpc.lab.networks.encoders import build
from adanpc.lab.seeds import seed_of
from adanpc.lab.settings import check_settings
from adanpc.lab.train.algorithm import Algorithm
from adanpc.lab.train.registry import ALGORITHMS
from adanpc.lab.train.run import BEST, CHECKPOINT, Run, RunError, check_vacant
from adanpc.lab.train.spec import Spec

GIVEN = ("self", "model", "domains", "adam")  # parameters of an algorithm that are no settings


class Split(NamedTuple):
    """A domain, and its two parts: four fifths to train or test on, one fifth to select by."""

    whole: Domain
    large: Domain
    small: Domain


def start(spec: Spec, data_dir: Path, folder: Path) -> Run:
    """A new run in a folder, checked against its data; nothing is trained yet."""
    check_vacant(folder)
    spec = spec.complete()
    check_settings(spec.algorithm, [ALGORITHMS[spec.algorithm], Algorithm], spec.hyper, GIVEN)
    data = read(spec.data, data_dir, seed=spec.seed)
    for name in spec.targets:
        data[name]  # names the domains there are, if it is none of them
    if len(set(spec.targets)) >= len(data.domains):
        raise AdaNPCError("no source domain is left: name fewer targets")
    described = {
        "folder": str(data_dir.resolve()),
        "channels": len(data.domains[0].images[0]),
        "classes": data.classes,
        "domains": {domain.name: len(domain) for domain in data.domains},
        "digest": data.digest(),
        "notice": data.notice,
    }
    _algorithm(spec, described, "cpu", fresh=True)  # refuses what cannot be trained before there is a folder
    return Run.create(folder, spec, described)


def assemble(run: Run, device: torch.device | str = "cpu", *, fresh: bool = False) -> Algorithm:
    """The algorithm of a run at its first step; with the initial weights only if ``fresh``."""
    return _algorithm(run.spec, run.data, device, fresh)


def _algorithm(spec: Spec, data: Mapping[str, Any], device: torch.device | str, fresh: bool) -> Algorithm:
    sources = [name for name in data["domains"] if name not in spec.targets]
    with torch.random.fork_rng():
        torch.manual_seed(seed_of(spec.seed, "weights"))
        model = build(
            spec.encoder,
            len(data["classes"]),
            channels=data["channels"],
            pretrained=bool(spec.pretrained) and fresh,
            weights=Path(spec.weights) if spec.weights and fresh else None,
            norm=spec.norm,
            dropout=spec.dropout,
            frozen_batchnorm=spec.frozen_batchnorm,
        )
        return ALGORITHMS[spec.algorithm](model.to(device), len(sources), **spec.hyper).to(device)


def load_algorithm(run: Run, which: str = "best") -> Algorithm:
    """The algorithm of a run as it was trained, in evaluation mode; its ``model`` is what test-time methods take.

    Args:
        run: that has been evaluated at least once.
        which: ``best`` by accuracy on the held-out parts of the source domains, or ``last``.
    """
    if which not in ("best", "last"):
        raise AdaNPCError(f"which must be 'best' or 'last', got {which!r}")
    algorithm = assemble(run)
    state = run.state(BEST if which == "best" else CHECKPOINT)
    if state is None:
        raise RunError(f"{run.folder} has no {which} model yet: adanpc train --resume {run.folder}")
    algorithm.restore(state["algorithm"])
    return algorithm.eval()


def splits(run: Run, transform: Transform | None) -> dict[str, Split]:
    """Every domain of the run's data in its two parts; refuses data other than the run was made on."""
    data = read(run.spec.data, Path(run.data["folder"]), seed=run.spec.seed)
    sizes = {domain.name: len(domain) for domain in data.domains}
    if sizes != run.data["domains"]:
        raise RunError(f"the data in {run.data['folder']} has changed: domains {sizes}, were {run.data['domains']}")
    seen = [some(domain, run.spec.images, run.spec.seed).with_transform(transform) for domain in data.domains]
    return {domain.name: Split(domain, *split(domain, run.spec.seed)) for domain in seen}
