"""Subjects: descriptions of source models that experiments start from, and the workspace where they are made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adanpc.files import held
from adanpc.lab.data import read
from adanpc.lab.data.domain import AbsentError, DataSet, Domain
from adanpc.lab.data.imagenet import CLASSES as IMAGENET_CLASSES
from adanpc.lab.networks import build, find_encoder
from adanpc.lab.networks.encoders import is_own_encoder
from adanpc.lab.networks.features import features
from adanpc.lab.networks.pretrained import with_part_of_head
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.seeds import seed_of
from adanpc.lab.sweep.scene import Builder, Scene, parts_of, prototypes_of, scene_of, source_of
from adanpc.lab.train.assemble import prepare
from adanpc.lab.train.loop import train
from adanpc.lab.train.process_group import ProcessGroup
from adanpc.lab.train.run import SPEC, Run
from adanpc.lab.train.spec import Spec

HIDDEN = 256  # units in the hidden layer of an ``mlp`` head
UPDATES = 2000  # optimizer steps that fit a head
LR = 1e-3  # the learning rate assumed for a model that was not trained here, for methods that scale it


@dataclass(frozen=True)
class Workspace:
    """Where the data is, and where models, features and records are kept.

    Args:
        data_dir: the folder of the data sets.
        folder: where results are written; a table that is made again finds earlier results there.
        device: where models compute.
    """

    data_dir: Path
    folder: Path
    device: str = "cpu"

    def data(self, name: str, seed: int) -> DataSet:
        """A data set; the last few that were read are kept in memory."""
        return _data(name, self.data_dir, seed)

    def sizes(self, name: str, seed: int) -> dict[str, int]:
        """The number of images in each domain of a data set; empty if it is not here."""
        try:
            return dict(_sizes(name, self.data_dir, seed))
        except AbsentError:
            return {}

    def count(self, name: str) -> int:
        """How many images a data set has; 0 if it is not here."""
        return sum(self.sizes(name, 0).values())


# A table of two data sets with three seeds uses six at once. Data sets are large, so only a few more are kept.
@lru_cache(maxsize=8)
def _data(name: str, root: Path, seed: int) -> DataSet:
    return read(name, root, seed=seed)


@cache  # unlike data sets, sizes are all kept: the estimate of a large table needs more of them than ``_data`` keeps
def _sizes(name: str, root: Path, seed: int) -> tuple[tuple[str, int], ...]:
    domains = _data(name, root, seed).domains
    return tuple((domain.name, len(domain)) for domain in domains)


@dataclass(frozen=True)
class Extent:
    """How much of the data is used; None stands for all of it.

    Args:
        images: the most images of each target.
        rows: the most bank rows from each source domain.
        recalled: the most held-out source images, in all.
        whole: draw the images from the whole target, and hold none back to select settings by.
    """

    images: int | None = None
    rows: int | None = None
    recalled: int | None = 1000
    whole: bool = False

    def document(self) -> dict[str, Any]:
        """The extent as JSON."""
        document = asdict(self)
        # ``whole`` was added later: without it, the ids of earlier records must stay the same.
        if not self.whole:
            del document["whole"]
        return document


ALL = Extent()


class Reading(NamedTuple):
    """What a subject reads and encodes, for estimates of its cost."""

    data: str
    targets: tuple[str, ...]
    known: tuple[str, str] | None  # the data set and domain of the source; None: all domains that are not targets
    seed: int
    images: int | None  # the most of each domain
    encoder: str
    model: str  # says which model it is: equal texts, equal features


@dataclass(frozen=True)
class Trained:
    """A model that is trained here.

    Args:
        spec: how it is trained.
        which: the best or the last model of the run.
    """

    spec: Spec
    which: Literal["best", "last"] = "last"

    def document(self) -> dict[str, Any]:
        """The subject as JSON, with every default and every drawn value filled in."""
        return {"spec": self.spec.complete().document(), "which": self.which}

    def reads(self) -> tuple[str, ...]:
        """The names of the data sets that are used."""
        return (self.spec.data,)

    def needs(self) -> tuple[str, ...]:
        """The names of the data sets that it cannot do without."""
        return self.reads()

    def missing(self, workspace: Workspace) -> list[str]:
        """Nothing: training reads a data set completely or refuses it."""
        return []

    def run(self, workspace: Workspace) -> Run:
        """The finished run. A model is trained only once, and an interrupted run continues."""
        document = json.dumps(self.spec.complete().document(), sort_keys=True)
        folder = workspace.folder / "models" / f"{seed_of(document):014x}"
        with held(folder.with_suffix(".lock"), wait=True):
            group = ProcessGroup(0, 1, torch.device(workspace.device))
            if (folder / SPEC).exists():
                run = Run(folder)
                if not run.finished():
                    train(run, group)
                return run
            data = workspace.data(self.spec.data, self.spec.seed)
            prepared = prepare(self.spec, workspace.data_dir, group.device, data)
            run = Run.create(folder, prepared.spec, prepared.description)
            train(run, group, prepared=prepared)
            return run

    def reading(self) -> Reading:
        """What decides the cost."""
        spec = self.spec.complete()
        model = json.dumps(self.document(), sort_keys=True)
        return Reading(spec.data, spec.targets, None, spec.seed, spec.images, spec.encoder, model)

    def scene(self, workspace: Workspace, extent: Extent) -> Scene:
        """Returns the model, its source and the targets, ready for test-time methods to run on."""
        run = self.run(workspace)
        return scene_of(
            run,
            which=self.which,
            images=extent.images,
            rows=extent.rows,
            recalled=extent.recalled,
            whole=extent.whole,
            device=workspace.device,
            data=workspace.data(self.spec.data, self.spec.seed),
        )


@dataclass(frozen=True)
class Frozen:
    """A published encoder with frozen weights; only its head may be fitted, to features of the source.

    Args:
        data: the data set that holds the targets.
        targets: the domains to adapt to; the other domains are the source.
        encoder: the name of an encoder, see ``adanpc.lab.networks.build``.
        weights: "pretrained" for those that come with the encoder, or a file in the folder of the data.
        head: ``own`` keeps the published head, or its rows for those classes of ImageNet that are here; ``untrained``
            draws one at random; ``linear`` and ``mlp`` are fitted.
        share: the share of the source that is available.
        known: the name and the domain of the data set that holds the source, if it is not ``data``. If that data set is
            not here, or without the domain, the weight rows of the head replace it, and the rest of that data set, if
            there is any, serves as the held-out source images.
        seed: seeds the splits and the head.
    """

    data: str
    targets: tuple[str, ...]
    encoder: str
    weights: str = "pretrained"
    head: Literal["own", "untrained", "linear", "mlp"] = "linear"
    share: float = 1.0
    known: tuple[str, str] | None = None
    seed: int = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A worker process receives this as a pickle, and must import an encoder of the user's own by itself.
        if is_own_encoder(self.encoder):
            find_encoder(self.encoder)

    def document(self) -> dict[str, Any]:
        """The subject as JSON."""
        return asdict(self)

    def reads(self) -> tuple[str, ...]:
        """The names of the data sets that are used."""
        if self.known is None:
            return (self.data,)
        return (self.data, self.known[0])

    def needs(self) -> tuple[str, ...]:
        """The names of the data sets that it cannot do without."""
        if self.head == "own":
            return (self.data,)  # the rows of the head can stand in for the source
        return self.reads()

    def reading(self) -> Reading:
        """What decides the cost."""
        model = f"{self.encoder} with {self.weights} weights"
        return Reading(self.data, self.targets, self.known, self.seed, None, self.encoder, model)

    def scene(self, workspace: Workspace, extent: Extent) -> Scene:
        """Returns the model, its source and the targets, ready for test-time methods to run on."""
        data = workspace.data(self.data, self.seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed_of(self.seed, "head"))
            model = self._model(workspace, data).to(workspace.device)
        builder = Builder(
            sources=[parts_of(domain, model, self.seed) for domain in self._sources(workspace, data)],
            targets=[parts_of(data[name], model, self.seed) for name in self.targets],
            seed=self.seed,
            cache=workspace.folder / "features",
        )
        if self._head_stands_in(workspace):
            source = prototypes_of(model, LR)
            return builder.scene(source, extent.images, extent.recalled, whole=extent.whole)
        known = builder.known(extent.rows, self.share)
        rows = torch.cat([features(model, domain, cache=builder.cache) for domain in known])
        if self.head in ("linear", "mlp"):
            labels = torch.cat([domain.labels for domain in known])
            model.head = fitted(model.head.cpu(), rows, labels, self.seed).to(workspace.device)
        source = source_of(model, known, rows, LR)
        return builder.scene(source, extent.images, extent.recalled, whole=extent.whole)

    def _model(self, workspace: Workspace, data: DataSet) -> SourceModel:
        """The encoder with the head that was chosen, not yet fitted."""
        weights = None if self.weights == "pretrained" else workspace.data_dir / self.weights
        classes = len(data.classes)
        in_part = self._has_part_of_imagenet(data)
        if in_part:
            classes = IMAGENET_CLASSES
        model = build(
            self.encoder,
            classes,
            channels=len(data.domains[0].images[0]),
            pretrained=weights is None,
            weights=weights,
        ).eval()
        if in_part:
            model = with_part_of_head(model, data.classes).eval()
        if self.head == "mlp":
            model.head = nn.Sequential(nn.Linear(model.dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, model.classes))
        elif self.head != "own":
            model.head = nn.Linear(model.dim, model.classes)
        return model

    def _has_part_of_imagenet(self, data: DataSet) -> bool:
        """Whether the published head is for more classes than the data has, so that only a part of it is needed."""
        is_published = self.head == "own" and self.weights == "pretrained" and not is_own_encoder(self.encoder)
        return is_published and self.data in ("imagenet", "imagenet-c") and len(data.classes) < IMAGENET_CLASSES

    def _sources(self, workspace: Workspace, data: DataSet) -> list[Domain]:
        """The source domains: one of another data set, or all that are not targets."""
        if self.known is None:
            return [domain for domain in data.domains if domain.name not in self.targets]
        name, domain = self.known
        if not workspace.sizes(name, self.seed):
            return []
        other = workspace.data(name, self.seed)
        if self._head_stands_in(workspace):
            return list(other.domains)
        return [other[domain]]

    def _lacks_known(self, workspace: Workspace) -> bool:
        """Whether the source is a domain of another data set, and that domain is missing here."""
        if self.known is None:
            return False
        name, domain = self.known
        return domain not in workspace.sizes(name, self.seed)

    def _head_stands_in(self, workspace: Workspace) -> bool:
        """Whether the weight rows of the head are the bank, because the source domain is missing here."""
        return self.head == "own" and self._lacks_known(workspace)

    def missing(self, workspace: Workspace) -> list[str]:
        """The domains that are needed but missing here, each with its data set, such as "noise of cifar-10-c"."""
        here = workspace.sizes(self.data, self.seed)
        names = [f"{target} of {self.data}" for target in self.targets if target not in here]
        if self.known is not None and self._lacks_known(workspace) and not self._head_stands_in(workspace):
            data, domain = self.known
            names.append(f"{domain} of {data}")
        return names


Subject = Trained | Frozen


def subject_of(document: Mapping[str, Any]) -> Subject:
    """The subject that ``document`` wrote."""
    if "spec" in document:
        return Trained(Spec.of(document["spec"]), document["which"])
    fields = dict(document)
    fields["targets"] = tuple(document["targets"])
    if document["known"] is not None:
        fields["known"] = tuple(document["known"])
    return Frozen(**fields)


def fitted(head: nn.Module, rows: Tensor, labels: Tensor, seed: int) -> nn.Module:
    """The head in evaluation mode, trained on features (n, D) with a fixed number of updates, whatever n is.

    During training, features are scaled to a mean length of 10, so that one learning rate suits every encoder.
    Afterward the first layer absorbs the scale, so that the head takes features as they are.
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
    layers = [module for module in head.modules() if isinstance(module, nn.Linear)]
    with torch.no_grad():
        layers[0].weight.div_(scale)
    return head.eval()
