"""Source models as values: what an experiment starts from, and where it is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adanpc.files import held
from adanpc.lab.adapt import Source
from adanpc.lab.data import read
from adanpc.lab.data.domain import DataSet, Domain, join, some, split
from adanpc.lab.networks import build
from adanpc.lab.networks.features import features
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.seeds import seed_of
from adanpc.lab.sweep.scene import Scene, evenly, scene_of
from adanpc.lab.train.assemble import start
from adanpc.lab.train.loop import train
from adanpc.lab.train.process_group import ProcessGroup
from adanpc.lab.train.run import SPEC, Run
from adanpc.lab.train.spec import Spec

HIDDEN = 256  # units of the head with a hidden layer
UPDATES = 2000  # of a head
LR = 1e-3  # of a model that was not trained here, for methods that scale it


@dataclass(frozen=True)
class Workshop:
    """Where data lie, and where models, features and records are kept.

    Args:
        data_dir: holds the data sets.
        folder: is written to; a table that is made again finds there what it has made before.
        device: where models compute.
    """

    data_dir: Path
    folder: Path
    device: str = "cpu"

    def data(self, name: str, seed: int) -> DataSet:
        """A data set, read once."""
        return _data(name, self.data_dir, seed)

    def count(self, name: str) -> int:
        """How many images a data set has."""
        return sum(map(len, self.data(name, 0).domains))


@lru_cache(maxsize=4)
def _data(name: str, root: Path, seed: int) -> DataSet:
    return read(name, root, seed=seed)


@dataclass(frozen=True)
class Extent:
    """How much of the data is met: images of each target, bank rows of each source domain, recalled images in all."""

    images: int | None = None
    rows: int | None = None
    recalled: int | None = 1000


ALL = Extent()


class Reading(NamedTuple):
    """What a subject reads, for estimates: targets and, unless ``known`` names one domain elsewhere, all others."""

    data: str
    targets: tuple[str, ...]
    known: tuple[str, str] | None
    seed: int
    images: int | None  # of each domain at most
    encoder: str


@dataclass(frozen=True)
class Trained:
    """The model of a run of training."""

    spec: Spec
    which: Literal["best", "last"] = "last"

    def document(self) -> dict[str, Any]:
        """As JSON has it, with every default and drawn value filled in."""
        return {"spec": self.spec.complete().document(), "which": self.which}

    def reads(self) -> tuple[str, ...]:
        """The data sets that are needed."""
        return (self.spec.data,)

    def run(self, shop: Workshop) -> Run:
        """The run, trained to its end; nothing is trained twice, and what was interrupted goes on."""
        name = f"{seed_of(json.dumps(self.spec.complete().document(), sort_keys=True)):014x}"
        folder = shop.folder / "models" / name
        with held(folder.with_suffix(".lock"), wait=True):
            run = Run(folder) if (folder / SPEC).exists() else start(self.spec, shop.data_dir, folder)
            if not run.finished():
                train(run, ProcessGroup(0, 1, torch.device(shop.device)))
        return run

    def reading(self) -> Reading:
        """What decides the cost."""
        spec = self.spec.complete()
        return Reading(spec.data, spec.targets, None, spec.seed, spec.images, spec.encoder)

    def scene(self, shop: Workshop, extent: Extent) -> Scene:
        """What methods meet."""
        run = self.run(shop)
        return scene_of(
            run,
            which=self.which,
            images=extent.images,
            rows=extent.rows,
            recalled=extent.recalled,
            device=shop.device,
        )


@dataclass(frozen=True)
class Frozen:
    """A published encoder as it is; only its head may be fitted, to features of the source.

    Args:
        data: the data set that holds the targets.
        targets: the domains that are met; the others are the source.
        encoder: by name, see ``adanpc.models.build``.
        weights: "pretrained" for those that come with the encoder, or a file below the data's folder.
        head: ``own`` keeps the one published; ``untrained`` draws it; ``linear`` and ``mlp`` are fitted.
        share: of the source that is known.
        known: if the source is in another data set: its name and the domain.
        seed: of splits and of the head.
    """

    data: str
    targets: tuple[str, ...]
    encoder: str
    weights: str = "pretrained"
    head: Literal["own", "untrained", "linear", "mlp"] = "linear"
    share: float = 1.0
    known: tuple[str, str] | None = None
    seed: int = 0

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    def reads(self) -> tuple[str, ...]:
        """The data sets that are needed."""
        return (self.data,) if self.known is None else (self.data, self.known[0])

    def reading(self) -> Reading:
        """What decides the cost."""
        return Reading(self.data, self.targets, self.known, self.seed, None, self.encoder)

    def scene(self, shop: Workshop, extent: Extent) -> Scene:
        """What methods meet."""
        data, cache = shop.data(self.data, self.seed), shop.folder / "features"
        with torch.random.fork_rng():
            torch.manual_seed(seed_of(self.seed, "head"))
            model = self._model(shop, data).to(shop.device)
        seen = {domain.name: domain.with_transform(model.preprocessing) for domain in self._sources(shop, data)}
        parts = [split(domain, self.seed) for domain in seen.values()]
        learned = [self._share(some(part, extent.rows, self.seed)) for part, _ in parts]
        known = join("source", learned)
        rows = torch.cat([features(model, part, cache=cache) for part in learned])
        if self.head in ("linear", "mlp"):
            model.head = fitted(model.head.cpu(), rows, known.labels, self.seed).to(shop.device)
        places = torch.cat([torch.full((len(part),), place) for place, part in enumerate(learned)])
        met = [split(data[name].with_transform(model.preprocessing), self.seed) for name in self.targets]
        return Scene(
            Source(model, rows, known.labels, places, known.take, LR),
            tuple(some(large, extent.images, self.seed) for large, _ in met),
            evenly([small for _, small in parts], extent.recalled, self.seed),
            tuple(some(small, extent.images and -(-extent.images // 4), self.seed) for _, small in met),
            cache,
        )

    def _model(self, shop: Workshop, data: DataSet) -> SourceModel:
        file = None if self.weights == "pretrained" else shop.data_dir / self.weights
        channels = len(data.domains[0].images[0])
        model = build(self.encoder, len(data.classes), channels=channels, pretrained=file is None, weights=file).eval()
        if self.head == "mlp":
            model.head = nn.Sequential(nn.Linear(model.dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, model.classes))
        elif self.head != "own":
            model.head = nn.Linear(model.dim, model.classes)
        return model

    def _sources(self, shop: Workshop, data: DataSet) -> list[Domain]:
        if self.known is not None:
            return [shop.data(self.known[0], self.seed)[self.known[1]]]
        return [domain for domain in data.domains if domain.name not in self.targets]

    def _share(self, domain: Domain) -> Domain:
        return some(domain, max(1, round(self.share * len(domain))), self.seed)


Subject = Trained | Frozen


def subject_of(document: Mapping[str, Any]) -> Subject:
    """The subject that ``document`` wrote."""
    if "spec" in document:
        return Trained(Spec.of(document["spec"]), document["which"])
    known = document["known"] and tuple(document["known"])
    return Frozen(**{**document, "targets": tuple(document["targets"]), "known": known})


def fitted(head: nn.Module, rows: Tensor, labels: Tensor, seed: int) -> nn.Module:
    """The head, trained on features (n, D) by as many updates of Adam whatever their number; in evaluation mode.

    Features are scaled by their mean length, so that one learning rate fits every encoder; the first layer takes the
    scale up afterwards.
    """
    scale = rows.norm(dim=1).mean().clamp(min=1e-12) / 10
    generator = torch.Generator().manual_seed(seed_of(seed, "fit"))
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-3, weight_decay=1e-4)
    with torch.enable_grad():
        for _ in range(UPDATES):
            batch = torch.randint(len(rows), (64,), generator=generator)
            optimizer.zero_grad()
            cross_entropy(head(rows[batch] / scale), labels[batch]).backward()
            optimizer.step()
    first = next(module for module in head.modules() if isinstance(module, nn.Linear))
    with torch.no_grad():
        first.weight.div_(scale)
    return head.eval()
