"""Banks of labeled images: of what a run was trained on, or of any folder and any encoder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from adanpc.core import AdaNPC, MemoryBank
from adanpc.errors import AdaNPCError
from adanpc.files import held
from adanpc.lab.data.domain import DataSet, Domain
from adanpc.lab.networks import build
from adanpc.lab.networks.features import features, features_in_pieces
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.assemble import load_algorithm, splits
from adanpc.lab.train.run import Run
from adanpc.models import Wrapped
from adanpc.models.layers import INPUT_OF
from adanpc.store.embeddings import AUTO, storage_for

LAYER = INPUT_OF + "head"  # of a source model
CHANNELS = 3  # of images in files


def of_run(run: Run, which: str = "best", **options: Any) -> Wrapped:
    """The model of a run over a bank of the images that it was trained on.

    Args:
        run: that was trained.
        which: the best or the last model.
        **options: see ``of_domains``.
    """
    model = load_algorithm(run, which).model
    known = [domain.with_transform(model.preprocessing) for domain in source_parts(run)]
    return of_domains(model, known, run.data["classes"], cache=run.folder / "features", **options)


def source_parts(run: Run) -> list[Domain]:
    """The images that a run was trained on, by domain: the rows of a bank that is made of it, in their order."""
    parts = splits(run, None)
    return [part.large for name, part in parts.items() if name not in run.spec.targets]


def of_images(
    data: DataSet, encoder: str, *, weights: Path | None = None, pretrained: bool = False, **options: Any
) -> Wrapped:
    """An encoder over a bank of labeled images.

    Args:
        data: the images.
        encoder: its name, see ``adanpc.lab.networks.build``.
        weights, pretrained: where its weights come from.
        **options: see ``of_domains``.
    """
    model = build(encoder, len(data.classes), channels=CHANNELS, weights=weights, pretrained=pretrained).eval()
    domains = [domain.with_transform(model.preprocessing) for domain in data.domains]
    return of_domains(model, domains, data.classes, **options)


def of_domains(
    model: SourceModel,
    domains: Sequence[Domain],
    classes: Sequence[str],
    *,
    cache: Path | None = None,
    workspace: Path | None = None,
    preset: str = "safe",
    settings: Mapping[str, Any] | None = None,
    storage: str = AUTO,
    **bank_settings: Any,
) -> Wrapped:
    """A model over a bank of the images of these domains.

    Args:
        model: that makes the features.
        domains: labeled images, as the model takes them.
        classes: their names.
        cache: a folder for features, which are kept there.
        workspace: a folder for features while the bank is built, a few thousand rows in a file; see ``workspace_for``.
        preset: how it learns.
        settings: of the preset.
        storage: see ``storage_for``.
        **bank_settings: of the ``MemoryBank``: capacity, evict.
    """
    rows = sum(len(domain) for domain in domains)
    bank_settings["storage"] = storage_for(rows, storage)
    bank = MemoryBank(model.dim, list(classes), soft=preset == "safe", **bank_settings)
    classifier = AdaNPC(bank, preset=preset, **(settings or {}))
    labels = torch.cat([domain.labels for domain in domains])
    places = [torch.full((len(domain),), place) for place, domain in enumerate(domains)]
    with TemporaryDirectory(prefix="adanpc-") as spare:
        pieces = _Pieces(model, domains, cache, workspace or Path(spare))
        classifier.learn_in_pieces(pieces, labels, domain=torch.cat(places), keys=torch.arange(rows))
    return Wrapped(model, classifier, LAYER, model.preprocessing)


@dataclass(frozen=True, eq=False)
class _Pieces:
    """The features of domains, all of a domain from a cache, or some at a time from a workspace."""

    model: SourceModel
    domains: Sequence[Domain]
    cache: Path | None
    workspace: Path

    def __iter__(self) -> Iterator[Tensor]:
        for domain in self.domains:
            if self.cache is not None:
                yield features(self.model, domain, cache=self.cache)
            else:
                yield from features_in_pieces(self.model, domain, self.workspace)


@contextmanager
def workspace_for(target: Path) -> Iterator[Path]:
    """A folder beside the target in which features are kept while a bank is built that shall be there.

    It stays if the work is interrupted or fails, so that the next attempt goes on from there, and goes when it is done.
    """
    target = target.absolute()
    folder = target.with_name(f".{target.name}.building")
    with held(folder / "lock", wait=False) as alone:
        if not alone:
            raise AdaNPCError(f"another process is building {target}: wait for it, or give another path")
        yield folder
        # The lock in it is open, and some file systems, such as NFS, keep an open file and so its folder. The work is
        # done all the same.
        shutil.rmtree(folder, ignore_errors=True)
