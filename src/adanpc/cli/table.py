"""``adanpc table`` and ``adanpc report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from adanpc.cli.app import app, one_sentence
from adanpc.lab.data.loading import cores
from adanpc.lab.show import render
from adanpc.lab.show.exhibit import Exhibit, Sheet
from adanpc.lab.show.report import write
from adanpc.lab.sweep.records import Records
from adanpc.lab.sweep.subjects import Workshop
from adanpc.lab.sweep.sweep import sweep
from adanpc.lab.tables import TABLES
from adanpc.lab.tables.make import absent, check_choice, choose, exhibit, note_choice, table_of, wanted, write_report
from adanpc.lab.tables.scale import SCALES
from adanpc.lab.train.process_group import known_device

OUT = Path("runs/tables")
ROOM = Console(width=1000)  # tables are never cut: a terminal that is narrower wraps them


@app.command()
def table(
    name: Annotated[str, typer.Argument(help="Which; --list names them.")] = "",
    list_: Annotated[bool, typer.Option("--list", help="Name every table and figure.")] = False,
    data_dir: Annotated[Path, typer.Option(help="The folder that holds the data sets.")] = Path("data"),
    out: Annotated[Path, typer.Option(help="Where records, models and results are kept.")] = OUT,
    budget: Annotated[str, typer.Option(help="Take the largest scale that fits, such as 30m or 2h.")] = "",
    scale: Annotated[str, typer.Option(help="Instead of a budget: " + ", ".join(SCALES) + ".")] = "",
    encoder: Annotated[str, typer.Option(help="Instead of the paper's, for photos.")] = "",
    only: Annotated[list[str] | None, typer.Option(help="Only these rows; may be repeated.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of training, instead of the scale's.")] = None,
    images: Annotated[int | None, typer.Option(min=5, help="Of each domain at most, instead of the scale's.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Settings to select from, instead of the scale's.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Repetitions, instead of the scale's.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one for each core.")] = None,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda; take one of the --workers for each.")] = "cpu",
    ray: Annotated[str, typer.Option(help="The address of a Ray cluster to run on, such as auto.")] = "",
) -> None:
    """Make a table or figure of the paper, ours beside the paper's.

    Ctrl-C loses nothing that was finished: the same command goes on. Without --budget or --scale it has the paper's
    size, which takes weeks on two cores; the estimate is printed first.
    """
    with one_sentence("Stopped; the same command goes on where it was."):
        if list_ or not name:
            _list()
            return
        made, shop = table_of(name), Workshop(data_dir, out, known_device(device))
        check_choice(made, only or (), encoder)
        processes = 1 if made.alone else workers or cores()
        sizes = {"steps": steps, "images": images, "trials": trials, "seeds": seeds}
        asked = {"encoder": encoder, "only": tuple(only or ()), **sizes}
        own = {field: value for field, value in asked.items() if value}
        chosen, cost = choose(made, budget, scale, own, shop, processes)
        typer.echo(cost, err=True)
        tasks, records = wanted(made, chosen, absent(made, shop)), Records(out)
        with records.writing():
            note_choice(out, name, chosen, budget)
            for reason in sweep(tasks, shop, records, ray="" if made.alone else ray, workers=processes):
                typer.echo(f"Left out: {reason}", err=True)
        shown = exhibit(name, shop, chosen)
        _print(shown)
        for path in write(shown, out):
            typer.echo(str(path))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="What adanpc table was given as --out.")] = OUT,
    data_dir: Annotated[Path, typer.Option(help="The folder that holds the data sets.")] = Path("data"),
) -> None:
    """Write one self-contained page with every table and figure that a folder holds."""
    with one_sentence():
        typer.echo(str(write_report(Workshop(data_dir, folder))))


def _list() -> None:
    wide = max(map(len, TABLES))
    for made in TABLES.values():
        typer.echo(f"{made.name:{wide}}  {made.title} ({made.source})")


def _print(shown: Exhibit) -> None:
    console = Console(highlight=False)
    console.print(f"{shown.title}. {shown.about}", markup=False)
    for part in shown.parts:
        if isinstance(part, Sheet):
            grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, title=render.heading(part), title_justify="left")
            for place, heading in enumerate(("", *part.columns)):
                grid.add_column(heading, justify="right" if place else "left", no_wrap=True)
            for (label, _), row in zip(part.rows, render.shown(part), strict=True):
                grid.add_row(Text(label), *(_text(cell) for cell in row))
            wide = Console(highlight=False, width=max(console.width, ROOM.measure(grid).maximum))
            wide.print(grid)
            for line in render.legend(part):
                console.print(line, markup=False)
    for note in shown.notes:
        console.print(f"Note: {note}", markup=False)


def _text(cell: render.Shown) -> Text:
    return Text.assemble((cell.ours, "bold" if cell.best else ""), (f" {cell.paper}" if cell.paper else "", "dim"))
