"""The folder of a run: its spec, its records, and the state of its training."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from textwrap import shorten
from typing import Any, cast

from adanpc.errors import AdaNPCError, UnavailableError
from adanpc.files import add_entry, entries, held, replace
from adanpc.lab.data.read import find_data
from adanpc.lab.environment import environment
from adanpc.lab.networks.encoders import check_named_encoder, find_encoder
from adanpc.lab.networks.sealed import SealError
from adanpc.lab.own import UntrustedCodeError, absolute_name
from adanpc.lab.train import checkpoint
from adanpc.lab.train.registry import UntrustedAlgorithmError, find, known
from adanpc.lab.train.spec import Spec, check_fields
from adanpc.require import text, whole

SPEC = "spec.json"
RECORDS = "records.jsonl"
CHECKPOINT = "checkpoint.safetensors"
BEST = "best.safetensors"
LOCK = "train.lock"
# How many seconds to wait for the lock. When a training process is killed, the processes that read images for it live
# on and share its lock, until they notice: they look for it every five seconds.
PATIENCE = 10.0
FORMAT = 3
MOST_CHANNELS = 1024
DOCUMENT_FIELDS = ("format", "spec", "data", "environment", "started")
DATA_FIELDS = ("folder", "channels", "classes", "domains", "digest", "notice", "skipped")


class RunError(UnavailableError):
    """A folder that is not a run, or a run that cannot be continued."""

    code = "bad-run"


class Run:
    """A folder with ``spec.json``, ``records.jsonl``, ``checkpoint.safetensors`` and ``best.safetensors``.

    Opening a run checks everything in its ``spec.json``, and refuses a folder that contains symbolic links, since
    writing through one would change a file somewhere else. It executes no code that only the run names.

    Args:
        folder: a folder created by ``Run.create``.
        algorithm: the name of the run's algorithm. It is needed only for a class of your own, and only if this process
            has not yet loaded it, by a ``Spec`` or by ``adanpc.lab.train.find``.
        encoder, data: the names of the run's encoder and data set, needed in the same cases.
    """

    def __init__(
        self, folder: str | Path, algorithm: str | None = None, *, encoder: str | None = None, data: str | None = None
    ) -> None:
        folder = Path(folder)
        self.folder = folder
        _load_named(algorithm, encoder, data)
        _refuse_links(folder)
        if not (folder / SPEC).is_file():  # a named pipe is no file, and reading it would wait for a writer
            raise RunError(f"{folder} is not a run of adanpc train: it has no file {SPEC}")
        try:
            document = json.loads((folder / SPEC).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"{folder} is not a run of adanpc train: {SPEC} cannot be read ({error})") from None
        try:
            self.document: Mapping[str, Any] = _checked(document, folder)
            self.spec = Spec.of(document["spec"])
            _check_spec(self.spec, document["data"]["domains"])
        except RunError:
            raise
        except UntrustedAlgorithmError:
            raise self._untrusted("algorithm", document["spec"]) from None
        except UntrustedCodeError:
            raise self._untrusted(_untrusted_field(document["spec"]), document["spec"]) from None
        except AdaNPCError as error:
            raise RunError(f"{folder / SPEC} was changed or is damaged: {error}; restore it, or train again") from None
        self._check_names(algorithm, encoder, data)

    def _check_names(self, algorithm: str | None, encoder: str | None, data: str | None) -> None:
        """Refuses names that are not those of the run."""
        folder = self.folder
        if algorithm is not None and known(algorithm) is not known(self.spec.algorithm):
            raise RunError(f"{folder} was trained with the algorithm {self.spec.algorithm}, not with {algorithm}")
        if encoder is not None and absolute_name(encoder) != absolute_name(self.spec.encoder):
            raise RunError(f"{folder} was trained with the encoder {self.spec.encoder}, not with {encoder}")
        if data is not None and absolute_name(data) != absolute_name(self.spec.data):
            raise RunError(f"{folder} was trained on the data set {self.spec.data!r}, not on {data!r}")

    def _untrusted(self, field: str, spec: Mapping[str, Any]) -> RunError:
        """Returns the error for code that only the run names, in this field of its spec."""
        return RunError(
            f"{self.folder} was trained with the {field} {spec[field]!r}, which is not part of adanpc, and a run does "
            f"not decide which code is executed: if you trust that {field}, name it yourself as `{field}`"
        )

    @classmethod
    def create(cls, folder: Path, spec: Spec, data: Mapping[str, Any]) -> Run:
        """Creates a run on data of this description; refuses a folder that already has a run."""
        document = {
            "format": FORMAT,
            "spec": spec.document(),
            "data": dict(data),
            "environment": environment(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        check_vacant(folder)
        with writing(folder):
            check_vacant(folder)  # again, since another process may have created a run in the meantime
            replace(folder / SPEC, lambda new: _write(new, json.dumps(document, indent=1)))
        return cls(folder, spec.algorithm)

    @property
    def data(self) -> Mapping[str, Any]:
        """The description of the data on which the run was created: folder, channels, classes, domains, sizes."""
        return cast(Mapping[str, Any], self.document["data"])

    def record(self, entry: Mapping[str, Any]) -> None:
        """Adds a line to the records."""
        add_entry(self.folder / RECORDS, entry)

    def records(self) -> list[dict[str, Any]]:
        """Returns one record for each evaluation, by step; if a crash made it repeat one, the last counts."""
        by_step: dict[int, dict[str, Any]] = {}
        for entry in entries(self.folder / RECORDS):
            step = entry.get("step")
            if type(step) is int:  # lines that something else wrote are ignored
                by_step[step] = entry
        return [by_step[step] for step in sorted(by_step)]

    def last_record(self) -> dict[str, Any]:
        """Returns the record of the last step; raises RunError if it is missing or incomplete."""
        for record in self.records():
            if record["step"] == self.spec.steps and self._is_last(record):
                return record
        raise RunError(
            f"{self.folder / RECORDS} has no complete record of the last step, {self.spec.steps}: "
            "it was changed; restore it, or train again in another folder"
        )

    def _is_last(self, record: Mapping[str, Any]) -> bool:
        """Returns whether a record has all that the last one must have: accuracies of all domains, and seconds."""
        if not isinstance(record.get("seconds"), int | float):
            return False
        endings = [""]
        if "held_out_by_head" in record:  # the run is answered by a vote, and the head's accuracies are recorded, too
            endings.append("_by_head")
        for ending in endings:
            if not _are_accuracies(record.get(f"held_out{ending}"), self.data["domains"]):
                return False
            if not _are_accuracies(record.get(f"target{ending}"), self.spec.targets):
                return False
        return True

    def finished(self) -> bool:
        """Returns whether the last step has been trained, evaluated and saved; the record is written before saving.

        If the state has sums, they are of steps that have not been evaluated yet.
        """
        state = self.state(CHECKPOINT)
        if state is None or state.get("sums"):
            return False
        return bool(state["algorithm"]["step"] >= self.spec.steps)

    def save(self, name: str, state: Mapping[str, Any]) -> None:
        """Writes a state to a file, completely or not at all."""
        checkpoint.write(self.folder / name, state)

    def state(self, name: str) -> dict[str, Any] | None:
        """Returns a saved state, or None if there is none; refuses a damaged file."""
        path = self.folder / name
        if not path.exists():
            return None
        try:
            state = checkpoint.read(path)
            algorithm = state.get("algorithm")
            if not isinstance(algorithm, dict) or type(algorithm.get("step")) is not int:
                raise SealError(f"{path} does not hold an algorithm and its step")
        except SealError as error:
            raise RunError(f"{error}; restore the file from a copy, or train again in another folder") from None
        return state

    @contextmanager
    def restoring(self, name: str) -> Iterator[None]:
        """Turns errors while restoring the state of this name, inside a ``with`` block, into a RunError.

        A state that cannot be restored does not belong to this run.
        """
        try:
            yield
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = shorten(f"{type(error).__name__}: {error}", 200, placeholder=" …")
            raise RunError(
                f"{self.folder / name} does not fit {SPEC} ({reason}): "
                "restore both as they were written, or train again in another folder"
            ) from None


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Holds the lock of a run inside a ``with`` block; refuses a second writer, in this process or another."""
    deadline = time.monotonic() + PATIENCE
    while True:
        with held(folder / LOCK, wait=False) as free:
            if free:
                yield
                return
        if time.monotonic() > deadline:
            raise RunError(f"another process is training in {folder}: wait for it to end, or choose another folder")
        time.sleep(0.1)


def check_vacant(folder: Path) -> None:
    """Refuses a folder that already has a run, or that contains symbolic links."""
    if (folder / SPEC).exists():
        raise RunError(f"{folder} already holds a run: resume that one, or choose another folder")
    _refuse_links(folder)


def _refuse_links(folder: Path) -> None:
    """Refuses a folder that contains symbolic links; see ``Run``."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            raise RunError(
                f"{path} is a symbolic link, and a run does not write through links: put the file itself there"
            )


def _checked(document: Any, folder: Path) -> dict[str, Any]:
    """Returns the contents of ``spec.json``, or raises an error that names the first wrong field."""
    if not isinstance(document, dict):
        raise AdaNPCError(f"it must hold a JSON object, got {document!r:.80}")
    # The format comes first: in another one, the fields may be different.
    version = document.get("format")
    if type(version) is int and version != FORMAT:
        remedy = "update adanpc" if version > FORMAT else "train it again, older checkpoints cannot be read"
        raise RunError(f"{folder} has format {version}, this version reads {FORMAT}: {remedy}")
    check_fields("the run", document, DOCUMENT_FIELDS)
    whole("format", version, least=FORMAT, most=FORMAT)
    text("started", document["started"])
    if not isinstance(document["environment"], dict):
        raise AdaNPCError(f"environment must be an object, got {document['environment']!r}")
    _check_data(document["data"])
    return document


def _check_data(data: Any) -> None:
    """Refuses a description of data that ``create`` would not have written."""
    if isinstance(data, dict):
        data.setdefault("skipped", [])  # runs created before images could be skipped do not have this field
    check_fields("data", data, DATA_FIELDS)
    for name in ("folder", "digest", "notice"):
        text(name, data[name])
    whole("channels", data["channels"], least=1, most=MOST_CHANNELS)
    classes = data["classes"]
    if not isinstance(classes, list) or not classes:
        raise AdaNPCError(f"classes must be a list of names, got {classes!r}")
    for name in classes:
        text("each of the classes", name)
    if not isinstance(data["skipped"], list):
        raise AdaNPCError(f"skipped must be a list of files, got {data['skipped']!r}")
    for name in data["skipped"]:
        text("each of the files that are skipped", name)
    domains = data["domains"]
    if not isinstance(domains, dict) or not domains:
        raise AdaNPCError(f"domains must be an object of sizes by name, got {domains!r}")
    for name, size in domains.items():
        whole(f"the size of domain {name!r}", size, least=0)


def _load_named(algorithm: str | None, encoder: str | None, data: str | None) -> None:
    """Loads the code that the caller names, so that ``spec.json`` may name it, too."""
    if algorithm is not None:
        find(algorithm)
    if encoder is not None:
        find_encoder(encoder)
    if data is not None:
        find_data(data)


def _untrusted_field(spec: Mapping[str, Any]) -> str:
    """Returns the field of a spec that names code of your own which this process has not loaded."""
    try:
        check_named_encoder(spec["encoder"])
    except UntrustedCodeError:
        return "encoder"
    return "data"


def _check_spec(spec: Spec, domains: Mapping[str, int]) -> None:
    """Refuses a spec that ``create`` could not have written: one with open settings, or with unknown targets."""
    if spec.complete() != spec:
        raise AdaNPCError("the spec leaves settings open that a run must specify")
    for target in spec.targets:
        if target not in domains:
            raise AdaNPCError(f"target {target!r} is not one of the domains {', '.join(domains)}")
    if set(domains) == set(spec.targets):
        raise AdaNPCError("every domain is a target, and none is left to train on")


def _are_accuracies(values: Any, domains: Collection[str]) -> bool:
    """Returns whether these are numbers by name, one for each of the domains."""
    if not isinstance(values, dict) or set(values) != set(domains):
        return False
    return all(isinstance(value, int | float) for value in values.values())


def _write(path: Path, text: str) -> None:
    """Writes text and a final newline."""
    path.write_text(text + "\n")
