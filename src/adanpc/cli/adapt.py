"""``adanpc adapt``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from adanpc.cli.app import REFUSED, app, one_sentence, settings
from adanpc.errors import AdaNPCError
from adanpc.files import add_entry
from adanpc.lab.adapt import ADAPTERS, find
from adanpc.lab.data.streams import STREAMS
from adanpc.lab.settings import check_settings
from adanpc.lab.sweep.adaptation import adapt as measure
from adanpc.lab.sweep.scene import scene_of
from adanpc.lab.train.process_group import known_device
from adanpc.lab.train.run import Run
from adanpc.require import did_you_mean

RECORDS = "adapt.jsonl"
ALL = "all"
COLUMNS = 120  # the table needs them, whatever the terminal says
LEGEND = (
    "Accuracy on each domain as its samples arrive; source: on held-out source images afterwards (before); "
    "ms: a sample's share of its batch, without the encoder's time (enc) where a method sees features; "
    "MB: memory beyond the model."
)


@app.command()
def adapt(
    run: Annotated[Path, typer.Argument(help="The folder of a trained run.")],
    method: Annotated[
        list[str],
        typer.Option(help="One or several, such as adanpc t3a; all; or your own, as module:Class or file.py:Class."),
    ],
    stream: Annotated[str, typer.Option(help="How samples arrive: " + ", ".join(STREAMS) + ".")] = "successive",
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="One or several; 32 by default.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="How many of each target domain at most.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of a method, as method.name=value; may be repeated.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="The run's algorithm, if it is your own: a run does not decide which code is executed."),
    ] = None,
    which: Annotated[str, typer.Option(help="The best or the last model of the run.")] = "best",
    seed: Annotated[int, typer.Option(min=0, help="Of the order of arrival, and of what methods draw.")] = 0,
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda.")] = "cpu",
) -> None:
    """Run test-time methods on the target domains of a run, and compare them.

    Each sample is answered as it arrives; labels are used only for counting. A fifth of each target is held back to
    select settings by, as in training.
    """
    with one_sentence("Stopped; the finished methods are in the records."):
        names = list(ADAPTERS) if ALL in method else method
        sizes = batch_size or [32]
        own_settings = _settings_by_method(set_ or [], names)
        # All that was typed is checked before any image is encoded, which may take minutes.
        for name in names:
            check_settings(name, [find(name)], own_settings.get(name, {}), ("source",))
        if stream not in STREAMS:
            hint = did_you_mean(stream, STREAMS)
            raise AdaNPCError(f"there is no stream {stream!r}; there are: {', '.join(STREAMS)}{hint}")
        order = STREAMS[stream](seed=seed)
        scene = scene_of(Run(run, algorithm), which=which, images=images, device=known_device(device))

        records = []
        for size in sizes:
            for name in names:
                try:
                    record = measure(scene, name, order, size, own_settings.get(name), seed)
                except AdaNPCError as error:
                    if len(names) * len(sizes) == 1:
                        raise  # there is nothing to compare: the sentence alone says it best
                    record = {"method": name, "batch_size": size, "error": str(error)}
                records.append(record)
                add_entry(run / RECORDS, {**record, "which": which, "images": images, "seed": seed})

        _show(records, [domain.name for domain in scene.targets], images)
        typer.echo(f"Records: {run / RECORDS}")
        if all("error" in record for record in records):
            raise typer.Exit(REFUSED)


def _settings_by_method(given: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the settings of each method, from texts method.name=value."""
    by_method: dict[str, dict[str, Any]] = {}
    for key, value in settings(given).items():
        method, _, name = key.rpartition(".")  # the last dot: that of file.py:Class comes before
        if method not in names:
            raise AdaNPCError(f"--set takes method.name=value with one of {', '.join(names)}, got {key}={value}")
        by_method.setdefault(method, {})[name] = value
    return by_method


def _show(records: Sequence[dict[str, Any]], domains: Sequence[str], images: int | None) -> None:
    """Prints the table, what its columns are, and why methods were refused."""
    console = Console(highlight=False)
    console.width = max(console.width, COLUMNS)
    console.print(_table(records, domains))
    if images is None:
        typer.echo(LEGEND)
    else:
        typer.echo(f"{LEGEND} Reduced: at most {images:,} images of each domain.")
    for record in records:
        if "error" in record:
            console.print(f"{record['method']}, batches of {record['batch_size']}: {record['error']}", markup=False)


def _table(records: Sequence[dict[str, Any]], domains: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), title="Accuracy (%)", title_justify="left")
    table.add_column("method", justify="left", no_wrap=True)
    for heading in ("batch", *domains, "mean", "source", "ms p50", "p99", "enc", "MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in records:
        method = record["method"].rpartition(":")[2]  # of a method of one's own, the class
        table.add_row(method, str(record["batch_size"]), *_cells(record, domains))
    return table


def _cells(record: dict[str, Any], domains: Sequence[str]) -> list[str]:
    """Returns the cells of a row after the method and the batch size."""
    if "error" in record:
        return ["–"] * (len(domains) + 6)
    accuracies = [f"{record['domains'][name]:.1f}" for name in domains]
    before = record["source"]["before"]
    after = list(record["source"]["after"].values())
    return [
        *accuracies,
        f"{record['average']:.1f}",
        f"{after[-1]:.1f} ({before:.1f})",
        f"{record['ms']['p50']:.2f}",
        f"{record['ms']['p99']:.2f}",
        f"{record['encoder_ms']:.2f}",
        f"{record['extra_bytes'] / 1e6:.1f}",
    ]
