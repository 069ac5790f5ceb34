"""What ``adanpc adapt`` evaluates methods on: a model and images, and the records of earlier evaluations of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adanpc.errors import AdaNPCError
from adanpc.files import add_entry, entries
from adanpc.lab.data.domain import DataSet
from adanpc.lab.networks import build
from adanpc.lab.networks.features import features
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.networks.weights import read
from adanpc.lab.own import is_own
from adanpc.lab.seeds import seed_of
from adanpc.lab.sweep.scene import RECALLED, Builder, Scene, parts_of, scene_of, source_of
from adanpc.lab.sweep.shape import RECORDS, both, count, fields, number
from adanpc.lab.sweep.subjects import LR, fitted
from adanpc.lab.train.assemble import model_file
from adanpc.lab.train.run import Run
from adanpc.version import __version__

FILE = "adapt.jsonl"
CHANNELS = 3  # of every image that is read from a file
MEASURED = both(  # checks everything in a record that is shown
    RECORDS["adapt"],
    fields(ms=fields(p50=number, p99=number), encoder_ms=number, extra_bytes=number, samples=count),
)


@dataclass(frozen=True)
class Evaluation:
    """A model and images to run methods on, before any image is encoded.

    Args:
        folder: where records and features are kept.
        domains: the names of the target domains.
        identity: a hash that changes if the model or the images do.
        scene: makes the scene, which encodes what methods need.
    """

    folder: Path
    domains: tuple[str, ...]
    identity: str
    scene: Callable[[], Scene]

    @property
    def records(self) -> Path:
        """The file that holds the records."""
        return self.folder / FILE

    def recall(self, question: Mapping[str, Any]) -> dict[str, Any] | None:
        """The earlier record that answers a question, or None. Records of a user's own class are never reused."""
        if is_own(str(question["method"])):
            return None  # its code may have changed since
        wanted = self._as_recorded(question)
        for entry in entries(self.records):
            answers_question = all(name in entry and entry[name] == value for name, value in wanted.items())
            if answers_question and MEASURED(entry):
                return entry
        return None

    def note(self, question: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
        """Writes a record to the disk and returns it as it was written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        entry = {**record, **self._as_recorded(question)}
        add_entry(self.records, entry)
        return entry

    def _as_recorded(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """A question with the model, the images and the version of adanpc that answer it, as JSON reads it back."""
        identified = {**question, "subject": self.identity, "version": __version__}
        # Through JSON, so that it equals what is read from the file: tuples become lists, for example.
        plain: dict[str, Any] = json.loads(json.dumps(identified))
        return plain


def of_run(
    run: Run, others: DataSet | None = None, *, which: str = "best", images: int | None = None, device: str = "cpu"
) -> Evaluation:
    """The evaluation of a run's model on the run's targets, or on other images.

    Args:
        run: a trained run.
        others: images to use instead of the run's targets.
        which: "best" or "last", the model to use.
        images: the most images of each target.
        device: where the model computes.
    """
    domains = run.spec.targets
    target_digest = run.data["digest"]
    if others is not None:
        if run.data["channels"] != CHANNELS:
            raise AdaNPCError(
                f"{run.folder} was trained on images with {run.data['channels']} channels, but images read from files "
                f"have {CHANNELS}: choose a run that was trained on color images"
            )
        others = others.labeled_as(run.data["classes"])
        domains = tuple(domain.name for domain in others.domains)
        target_digest = others.digest()
    if not domains:
        raise AdaNPCError(f"{run.folder} has no target domains: pass the images to adapt to as `on`")
    identity = _identity(run.folder / model_file(which), run.data["digest"], target_digest, device)
    return Evaluation(
        run.folder,
        domains,
        identity,
        lambda: scene_of(run, which=which, images=images, device=device, others=others),
    )


def of_weights(
    weights: Path,
    encoder: str,
    source: DataSet,
    target: DataSet,
    folder: Path,
    *,
    images: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Evaluation:
    """The evaluation of a network whose weights are in a file.

    If the file has no head for the classes of the source, a linear one is fitted to the features of the source.

    Args:
        weights: a file, see ``adanpc.lab.networks.build``.
        encoder: the name of the network.
        source: the labeled images that the network was trained on; a fifth of each domain is held out. The head has
            their classes, in the same order.
        target: the images to adapt to; their classes are matched to those of the source by name.
        folder: where records and features are kept.
        images: the most images of each target.
        seed: seeds the splits, and the head if one is fitted.
        device: where the model computes.
    """
    target = target.labeled_as(source.classes)
    with torch.random.fork_rng():
        torch.manual_seed(seed_of(seed, "head"))
        model = build(encoder, len(source.classes), channels=CHANNELS, weights=weights).eval()
    identity = _identity(weights, encoder, source.digest(), target.digest(), device, str(seed))

    def scene() -> Scene:
        builder = Builder(
            sources=[parts_of(domain, model, seed) for domain in source.domains],
            targets=[parts_of(domain, model, seed) for domain in target.domains],
            seed=seed,
            cache=folder / "features",
        )
        known = builder.known(None)
        model.to(device)
        rows = torch.cat([features(model, domain, cache=builder.cache) for domain in known])
        if not has_own_head(model, weights):
            labels = torch.cat([domain.labels for domain in known])
            model.head = fitted(model.head.cpu(), rows, labels, seed).to(device)
        return builder.scene(source_of(model, known, rows, LR), images, RECALLED)

    return Evaluation(folder, tuple(domain.name for domain in target.domains), identity, scene)


def has_own_head(model: SourceModel, weights: Path) -> bool:
    """Whether the head of a model was read from its file of weights, rather than drawn at random."""
    head = model.head.weight
    if not isinstance(head, torch.Tensor):
        return False
    return any(value.shape == head.shape and torch.equal(value, head) for value in read(weights).values())


def _identity(file: Path, *texts: str) -> str:
    """A hash of the contents of a file and of texts. A missing file is not an error here: opening it will be one."""
    digest = hashlib.sha256()
    if file.is_file():
        with file.open("rb") as contents:
            digest = hashlib.file_digest(contents, "sha256")
    for text in texts:
        digest.update(f"\0{text}".encode())
    return digest.hexdigest()[:16]
