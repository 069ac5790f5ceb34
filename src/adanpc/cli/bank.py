"""``adanpc bank``: durable banks, which keep every change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from getpass import getuser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from adanpc.cli.app import REFUSED, app, one_sentence, print_json, settings
from adanpc.cli.names import ENCODERS, PRESETS, completing
from adanpc.errors import AdaNPCError
from adanpc.printable import on_one_line

if TYPE_CHECKING:
    from torch import Tensor

    from adanpc.core import AdaNPC, Change
    from adanpc.store import DurableBank

SHOWN = 20  # entries of a log that are listed by default
SHOWN_ROWS = 5  # of an entry
COLUMNS = 100  # the table of the log needs this width, even if the terminal is narrower

bank = typer.Typer(no_args_is_help=True, help="Create and manage durable banks: folders in which no change is lost.")
app.add_typer(bank, name="bank")

Folder = Annotated[Path, typer.Argument(help="The folder of a durable bank.")]
Ids = Annotated[list[int], typer.Argument(help="The ids of rows.")]
Who = Annotated[str, typer.Option(help="Who makes the change. Default: the name of the current user.")]
Why = Annotated[str, typer.Option(help="The reason for the change.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@bank.command()
def create(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    source: Annotated[
        Path,
        typer.Option(
            "--from",
            help="A saved bank (.safetensors); embeddings (.csv, .parquet, .npy); the folder of a run; or, with "
            "--encoder, a folder of images <class>/<image> or <domain>/<class>/<image>, or a file that lists images.",
        ),
    ],
    labels: Annotated[
        Path | None, typer.Option(help="The labels for embeddings in a .npy file, as another .npy file.")
    ] = None,
    encoder: Annotated[
        str,
        typer.Option(
            help="The network that turns images into features, such as resnet-18 or timm:NAME.",
            autocompletion=completing(ENCODERS),
        ),
    ] = "",
    weights: Annotated[Path | None, typer.Option(help="A file of weights for the --encoder.")] = None,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Use the published weights of the --encoder.")
    ] = False,
    which: Annotated[str, typer.Option(help="Which model of the run to use: best or last.")] = "best",
    preset: Annotated[
        str, typer.Option(help="How the bank learns: safe or paper.", autocompletion=completing(PRESETS))
    ] = "safe",
    storage: Annotated[
        str,
        typer.Option(
            help="How rows are stored: float32, float16, int8 or progressive; auto uses float32, and int8 from 20,000 "
            "rows on, which is the fastest for many queries at a time."
        ),
    ] = "auto",
    capacity: Annotated[
        int | None, typer.Option(min=1, help="The most rows that may join the bank. Default: no limit.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the preset, as name=value; may be repeated.")
    ] = None,
    json: Json = False,
) -> None:
    """Create a durable bank from labeled rows or from a saved bank.

    From images, an interrupted command goes on where it was when it is run again: features are kept as they are made.
    """
    with one_sentence():
        from adanpc.require import one_of
        from adanpc.store.file import read

        one_of("preset", preset, PRESETS)
        if not source.exists():
            raise AdaNPCError(f"{source} was not read: there is no such file or folder")
        options: dict[str, Any] = {
            "preset": preset,
            "settings": settings(set_ or []),
            "storage": storage,
            "capacity": capacity,
        }
        if encoder:
            _refuse_unused(context, "images", ("labels", "which"))
            _create_from_images(folder, source, encoder, weights, pretrained, options, json)
            return
        if source.is_dir():
            _refuse_unused(context, "a run", ("labels", "weights", "pretrained"))
            classifier, recipe = _of_run(source, which, options)
        elif source.suffix.lower() == ".safetensors":
            _refuse_unused(
                context,
                "a saved bank",
                ("labels", "weights", "pretrained", "which", "preset", "storage", "capacity", "set_"),
            )
            classifier, recipe = read(source)
        else:
            _refuse_unused(context, "embeddings", ("weights", "pretrained", "which"))
            classifier = _of_embeddings(source, labels, options)
            recipe = {}
        _create(folder, classifier, recipe, json)


def _create(folder: Path, classifier: AdaNPC, recipe: dict[str, str], json: bool) -> None:
    from adanpc.store import DurableBank

    with DurableBank.create(folder, classifier, recipe) as created:
        _tell(created, "Created", folder, json)


def _create_from_images(
    folder: Path,
    source: Path,
    encoder: str,
    weights: Path | None,
    pretrained: bool,
    options: dict[str, Any],
    json: bool,
) -> None:
    """Creates a bank from images; if that is interrupted, the same command goes on where it was."""
    from adanpc.lab.banks import of_images, workspace_for
    from adanpc.lab.data import read_images
    from adanpc.lab.networks import find_encoder

    find_encoder(encoder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AdaNPCError(f"{folder} was not created: something is there already; give the path of a new folder")
    data = read_images(source)
    with workspace_for(folder) as workspace:
        wrapped = of_images(data, encoder, weights=weights, pretrained=pretrained, workspace=workspace, **options)
        _create(folder, wrapped.classifier, wrapped.recipe, json)


def _refuse_unused(context: typer.Context, what: str, names: Sequence[str]) -> None:
    """Refuses options that would be ignored."""
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name)
        if name in names and given is not None and given.name == "COMMANDLINE":
            raise AdaNPCError(f"the bank is made from {what}, so {parameter.opts[0]} has no effect: omit it")


def _of_run(source: Path, which: str, options: dict[str, Any]) -> tuple[AdaNPC, dict[str, str]]:
    from adanpc.lab.banks import of_run
    from adanpc.lab.train.run import SPEC, Run

    if not (source / SPEC).exists():
        raise AdaNPCError(f"{source} is not a run: name the `encoder` that turns the images in it into features")
    wrapped = of_run(Run(source), which, **options)
    return wrapped.classifier, wrapped.recipe


def _of_embeddings(source: Path, labels: Path | None, options: dict[str, Any]) -> AdaNPC:
    from adanpc.store.embeddings import classifier_of, read_embeddings

    return classifier_of(read_embeddings(source, labels), **options)


@bank.command()
def info(folder: Folder, json: Json = False) -> None:
    """Show what a bank holds, even while it is in use."""
    with one_sentence():
        from adanpc.store import SqliteLog
        from adanpc.store.recovery import recovered

        log = SqliteLog(folder, read_only=True)
        try:
            found = recovered(log)
            contents = found.classifier.bank.contents
            document = {
                "position": log.position,
                "start": log.start,
                "snapshots": log.snapshots(),
                "rows": len(contents),
                "admitted": int(contents.admitted.sum()),
                "vetoed": len(contents.vetoed),
                "deleted": len(contents.deleted),
                "preset": found.classifier.preset,
                "bank": contents.settings.arguments(),
                "recipe": found.recipe,
                "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
                "digest": found.classifier.digest(),
                "notices": [*log.notices, *found.notices],
            }
        finally:
            log.close()
        if json:
            print_json(document)
        else:
            _show_info(document)


def _show_info(document: dict[str, Any]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in document.items():
        if name != "notices":
            table.add_row(name, Text(on_one_line(str(value))))
    Console(highlight=False).print(table)
    for notice in document["notices"]:
        typer.echo(f"Note: {on_one_line(notice)}.", err=True)


@bank.command()
def log(
    folder: Folder,
    after: Annotated[int | None, typer.Option(min=0, help="List all changes after this position.")] = None,
    last: Annotated[int, typer.Option(min=1, help="Without --after: how many of the newest to list.")] = SHOWN,
    json: Json = False,
) -> None:
    """List the changes of a bank: what happened, who did it, why and when."""
    with one_sentence():
        from adanpc.store import SqliteLog

        opened = SqliteLog(folder, read_only=True)
        try:
            start = max(opened.start, opened.position - last)
            if after is not None:
                start = after
            entries = []
            for position, change in enumerate(opened.read(start), start + 1):
                entries.append({"position": position, **_summary(change)})
        finally:
            opened.close()
        if json:
            print_json({"entries": entries})
        else:
            _show_log(entries)


def _summary(change: Change) -> dict[str, Any]:
    """The fields of a change, with the shapes of tensors instead of their values."""
    from torch import Tensor

    kept: dict[str, Any] = {"kind": type(change).__name__.lower()}
    for field in fields(change):
        value = getattr(change, field.name)
        if isinstance(value, Tensor):
            value = list(value.shape)
        if isinstance(value, str | int | float | tuple | list | None):
            kept[field.name] = value
    return kept


def _show_log(entries: Sequence[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("position", "when", "change", "rows", "who", "why"):
        table.add_column(heading)
    for entry in entries:
        cells = (str(entry["position"]), _time(entry["when"]), entry["kind"], _rows(entry), entry["who"], entry["why"])
        shown = [Text(on_one_line(cell)) for cell in cells]
        table.add_row(*shown)
    console = Console(highlight=False)
    console.width = max(console.width, COLUMNS)
    console.print(table)


def _time(seconds: float | None) -> str:
    """A time in a form that people can read; a number outside the calendar is shown as it is."""
    if seconds is None:
        return ""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
    except (ValueError, OverflowError, OSError):
        return str(seconds)


def _rows(entry: dict[str, Any]) -> str:
    """The rows that a change is about, in a few words."""
    if "ids" in entry:
        shown = ", ".join(str(row) for row in entry["ids"][:SHOWN_ROWS])
        more = len(entry["ids"]) - SHOWN_ROWS
        if more > 0:
            shown = f"{shown} and {more} more"
        if isinstance(entry.get("label"), int):  # not if each row got a label of its own
            shown = f"{shown} to class {entry['label']}"
        return shown
    if "features" in entry:
        return f"{entry['features'][0]} new"
    if "to" in entry:
        return f"back to {entry['to']}"
    return ""


@bank.command()
def verify(folder: Folder, json: Json = False) -> None:
    """Check a whole bank: every change is intact, and the snapshots match the changes."""
    with one_sentence():
        from adanpc.store import verify as read_all

        report = read_all(folder)
        if json:
            print_json(asdict(report))
        elif not report.problems:
            typer.echo(f"{folder} is whole: changes {report.start} … {report.position}, digest {report.digest}")
        for problem in report.problems:
            typer.echo(f"adanpc: {on_one_line(problem)}", err=True)
        if report.problems:
            raise typer.Exit(REFUSED)


@bank.command()
def veto(folder: Folder, ids: Ids, who: Who = "", why: Why = "", json: Json = False) -> None:
    """Silence rows: they may no longer vote."""
    from adanpc.core.changes import Veto

    _change(folder, lambda opened: opened.apply(Veto(tuple(ids), _name(who), why)), json)


@bank.command()
def restore(folder: Folder, ids: Ids, who: Who = "", why: Why = "", json: Json = False) -> None:
    """Let rows that were vetoed vote again."""
    from adanpc.core.changes import Restore

    _change(folder, lambda opened: opened.apply(Restore(tuple(ids), _name(who), why)), json)


@bank.command()
def relabel(
    folder: Folder,
    ids: Ids,
    label: Annotated[str, typer.Option(help="The class that the rows belong to: its name or its number.")],
    who: Who = "",
    why: Why = "",
    json: Json = False,
) -> None:
    """Correct the labels of rows."""
    from adanpc.core.changes import Relabel

    def correct(opened: DurableBank) -> object:
        names = opened.contents.settings.names
        numbers = [str(each) for each in range(opened.contents.settings.classes)]
        if label in names:
            number = names.index(label)
        elif label in numbers:
            number = numbers.index(label)
        else:
            known = ", ".join(names) or f"0 … {opened.contents.settings.classes - 1}"
            raise AdaNPCError(f"`label` must be one of {known}, got {label!r}")
        return opened.apply(Relabel(tuple(ids), number, _name(who), why))

    _change(folder, correct, json)


@bank.command()
def rollback(
    folder: Folder,
    to: Annotated[int, typer.Option(min=0, help="The position to return to; see adanpc bank log.")],
    who: Who = "",
    why: Why = "",
    json: Json = False,
) -> None:
    """Return to an earlier position; this is itself a change, so nothing is lost."""
    _change(folder, lambda opened: opened.rollback(to, who=_name(who), why=why), json)


@bank.command("import")
def import_(
    folder: Folder,
    file: Annotated[Path, typer.Argument(help="Labeled embeddings: .csv, .parquet or .npy.")],
    labels: Annotated[
        Path | None, typer.Option(help="The labels for embeddings in a .npy file, as another .npy file.")
    ] = None,
    who: Who = "",
    why: Why = "",
    json: Json = False,
) -> None:
    """Add labeled rows as an expert's rows, which are never evicted."""

    def add(opened: DurableBank) -> object:
        from adanpc.core import Append, Origin
        from adanpc.store import read_embeddings

        given = read_embeddings(file, labels)
        known = opened.contents.settings
        numbers = given.labels_in(known.names, known.classes)
        domains: Tensor | int = -1
        if given.domains is not None:
            domains = given.domains
        change = Append(
            given.features, numbers, Origin.EXPERT, domain=domains, keys=given.keys, who=_name(who), why=why
        )
        return opened.apply(change)

    _change(folder, add, json)


@bank.command()
def export(
    folder: Folder,
    file: Annotated[
        Path,
        typer.Argument(
            help="The file to write: .safetensors, the whole bank; .parquet, its rows; or .onnx, its vote without "
            "adaptation."
        ),
    ],
    json: Json = False,
) -> None:
    """Export a bank for other programs, even while it is in use."""
    with one_sentence():
        from adanpc.require import one_of
        from adanpc.store import SqliteLog, write_onnx, write_parquet
        from adanpc.store.file import write
        from adanpc.store.recovery import recovered

        kind = one_of("the ending of the file", file.suffix.lower(), (".safetensors", ".parquet", ".onnx"))
        opened = SqliteLog(folder, read_only=True)
        try:
            found = recovered(opened)
        finally:
            opened.close()
        if kind == ".safetensors":
            write(found.classifier, found.recipe, file)
        elif kind == ".parquet":
            write_parquet(found.classifier.bank.contents, file)
        else:
            write_onnx(found.classifier, file)
        document = {"file": str(file), "position": found.classifier.position, "rows": len(found.classifier.bank)}
        if json:
            print_json(document)
        else:
            typer.echo(f"Written: {file}, {document['rows']:,} rows at position {document['position']}.")


@bank.command()
def compact(
    folder: Folder,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest snapshots to keep.")] = 2,
    json: Json = False,
) -> None:
    """Drop all changes before the oldest snapshot that is kept; you cannot roll back beyond it.

    With --keep 1, nothing is left of rows that were deleted.
    """
    _change(folder, lambda opened: opened.compact(keep=keep), json)


def _name(given: str) -> str:
    """Who makes a change: the given name, or that of the user, who may have none in a container."""
    if given:
        return given
    try:
        return getuser()
    except (KeyError, OSError):
        return ""


def _change(folder: Path, action: Callable[[DurableBank], object], json: bool) -> None:
    """Opens a bank, changes it, and prints its new position."""
    with one_sentence():
        from adanpc.store import DurableBank

        with DurableBank.open(folder) as opened:
            action(opened)
            _tell(opened, "Done", folder, json)


def _tell(opened: DurableBank, what: str, folder: Path, json: bool) -> None:
    rows = len(opened.contents)
    for notice in opened.notices:
        typer.echo(f"Note: {on_one_line(notice)}.", err=True)
    if json:
        print_json({"bank": str(folder), "position": opened.position, "start": opened.log.start, "rows": rows})
    else:
        typer.echo(f"{what}: {folder} is at position {opened.position}, with {rows:,} rows.")
