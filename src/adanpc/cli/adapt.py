"""``adanpc adapt``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from adanpc.cli.app import app, one_sentence, settings
from adanpc.errors import AdaNPCError
from adanpc.files import add_entry
from adanpc.lab.adapt import ADAPTERS
from adanpc.lab.data.streams import STREAMS
from adanpc.lab.sweep.adaptation import adapt as measure
from adanpc.lab.sweep.scene import scene_of
from adanpc.lab.train.process_group import known_device
from adanpc.lab.train.run import Run

RECORDS = "adapt.jsonl"
ALL = "all"
COLUMNS = 120  # the table needs them, whatever the terminal says
LEGEND = (
    "Each domain as it is met; source: on held-out images afterwards (before); ms: a sample's share of its batch, "
    "without the encoder's time (enc) where a method sees features; MB: held beyond the model."
)


@app.command()
def adapt(
    run: Annotated[Path, typer.Argument(help="The folder of a trained run.")],
    method: Annotated[list[str], typer.Option(help="Such as adanpc or t3a, several, or all; a wrong name lists all.")],
    stream: Annotated[str, typer.Option(help="How samples arrive: " + ", ".join(STREAMS) + ".")] = "successive",
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="One or several; by default 32.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Of each target domain at most.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of a method, as method.name=value; may be repeated.")
    ] = None,
    which: Annotated[str, typer.Option(help="The best or the last model of the run.")] = "best",
    seed: Annotated[int, typer.Option(min=0, help="Of the order of arrival, and of what methods draw.")] = 0,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
) -> None:
    """Meet the target domains of a run with test-time methods, and compare.

    Each sample is answered as it arrives; labels are used for counting alone. A fifth of each target is left to select
    settings by, as in training.
    """
    with one_sentence("Stopped; what was finished is in the records."):
        names = list(ADAPTERS) if ALL in method else method
        own = _settings(set_ or [], names)
        if stream not in STREAMS:
            raise AdaNPCError(f"there is no stream {stream!r}; there are: {', '.join(STREAMS)}")
        scene = scene_of(Run(run), which=which, images=images, device=known_device(device))
        order, records = STREAMS[stream](seed=seed), []
        for size in batch_size or [32]:
            for name in names:
                try:
                    record = measure(scene, name, order, size, own.get(name), seed)
                except AdaNPCError as error:
                    if len(names) == 1:
                        raise
                    record = {"method": name, "batch_size": size, "error": str(error)}
                records.append(record)
                add_entry(run / RECORDS, {**record, "which": which, "images": images, "seed": seed})
        console = Console(highlight=False)
        console.width = max(console.width, COLUMNS)
        console.print(_table(records, [domain.name for domain in scene.targets]))
        typer.echo(LEGEND + ("" if images is None else f" Reduced: at most {images:,} images of each domain."))
        for record in records:
            if "error" in record:
                console.print(f"{record['method']}, batches of {record['batch_size']}: {record['error']}", markup=False)
        typer.echo(f"Records: {run / RECORDS}")


def _settings(given: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The settings of each method from texts method.name=value."""
    made: dict[str, dict[str, Any]] = {}
    for name, value in settings(given).items():
        method, dot, key = name.partition(".")
        if not dot or method not in names:
            raise AdaNPCError(f"--set takes method.name=value with one of {', '.join(names)}, got {name}={value}")
        made.setdefault(method, {})[key] = value
    return made


def _table(records: Sequence[dict[str, Any]], domains: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), title="Accuracy (%)", title_justify="left")
    for heading in ("method", "batch", *domains, "mean", "source", "ms p50", "p99", "enc", "MB"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for record in records:
        table.add_row(record["method"], str(record["batch_size"]), *_cells(record, domains))
    return table


def _cells(record: dict[str, Any], domains: Sequence[str]) -> list[str]:
    if "error" in record:
        return ["–"] * (len(domains) + 6)
    source, ms = record["source"], record["ms"]
    return [
        *(f"{record['domains'][name]:.1f}" for name in domains),
        f"{record['average']:.1f}",
        f"{list(source['after'].values())[-1]:.1f} ({source['before']:.1f})",
        *(f"{value:.2f}" for value in (ms["p50"], ms["p99"], record["encoder_ms"])),
        f"{record['extra_bytes'] / 1e6:.1f}",
    ]
