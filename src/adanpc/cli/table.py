"""``adanpc table``: reproduce a table of the paper; ``adanpc report``: all of them on one page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from adanpc.cli.app import REFUSED, app, one_sentence, print_json
from adanpc.cli.names import ENCODERS, SCALES, TABLES, completing
from adanpc.errors import AdaNPCError
from adanpc.printable import on_one_line

if TYPE_CHECKING:
    from adanpc.lab.show.exhibit import Exhibit, Sheet
    from adanpc.lab.show.render import Shown
    from adanpc.lab.tables.choice import Estimate

OUT = Path("runs/tables")
UNLIMITED = Console(width=1000)  # tables are never cut; a narrow terminal wraps them
LONG = 3600.0  # seconds; if the user has not chosen a size, work that takes longer must be confirmed


@app.command()
def table(
    name: Annotated[
        str,
        typer.Argument(help="The table or figure to make; --list shows the names.", autocompletion=completing(TABLES)),
    ] = "",
    list_: Annotated[bool, typer.Option("--list", help="List every table and figure.")] = False,
    data_dir: Annotated[Path, typer.Option(help="The folder that holds the data sets.")] = Path("data"),
    out: Annotated[Path, typer.Option(help="Where records, models and results are kept.")] = OUT,
    budget: Annotated[
        str, typer.Option(help="Time allowed, such as 30m or 2h: the largest scale that fits is used.")
    ] = "",
    scale: Annotated[
        str,
        typer.Option(
            help="Size of the experiment, instead of --budget: " + ", ".join(SCALES) + ".",
            autocompletion=completing(SCALES),
        ),
    ] = "",
    encoder: Annotated[
        str,
        typer.Option(
            help="Encoder for photos, instead of the paper's; or your own, as module:function or file.py:function.",
            autocompletion=completing(ENCODERS),
        ),
    ] = "",
    only: Annotated[list[str] | None, typer.Option(help="Make only these rows; may be repeated.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Your own methods, as further rows of adaptation tables: module:Class or file.py:Class; may be "
            "repeated."
        ),
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            help="Your own training algorithms, as further rows of ood tables: module:Class or file.py:Class; may be "
            "repeated."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps, overriding the scale.")] = None,
    images: Annotated[int | None, typer.Option(min=5, help="The most images per domain, overriding the scale.")] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Hyperparameter settings to select from, overriding the scale.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many random seeds to run, overriding the scale.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of processes. Default: one per core.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda; use one worker per GPU.")] = "cpu",
    ray: Annotated[str, typer.Option(help="The address of a Ray cluster to run on, such as auto.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Start without asking, however long it takes.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Reproduce a table or figure of the paper, with our numbers beside the paper's.

    Without --budget or --scale the table has the paper's size, which takes weeks on two cores. An estimate is printed
    first, and work of more than an hour must be confirmed. Ctrl-C loses nothing that is finished: the same command
    continues.
    """
    with one_sentence("Stopped; the same command continues.", disk_full="run the same command again"):
        from adanpc.lab.show.report import write
        from adanpc.lab.tables import make

        if list_ or not name:
            list_tables(as_json=json)
            return

        def consent(estimate: Estimate) -> None:
            if not (yes or budget or scale) and estimate.seconds > LONG:
                _ask(name, estimate)

        exhibit = make(
            name,
            data_dir=data_dir,
            out=out,
            scale=scale,
            budget=budget,
            only=only or (),
            methods=method or (),
            algorithms=algorithm or (),
            encoder=encoder,
            steps=steps,
            images=images,
            trials=trials,
            seeds=seeds,
            workers=workers,
            device=device,
            ray=ray,
            notify=lambda message: typer.echo(on_one_line(message), err=True),
            consent=consent,
        )
        if not json:
            show(exhibit)
        paths = [str(path) for path in write(exhibit, out)]
        if json:
            print_json({**exhibit.document(), "files": paths})
            return
        for path in paths:
            typer.echo(path)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder that was passed to adanpc table as --out.")] = OUT,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="The folder that holds the data sets, if they have moved since the tables were made."),
    ] = None,
    encoder: Annotated[
        str, typer.Option(help="The encoder that tables were made with, if it is your own, as module:function.")
    ] = "",
    method: Annotated[
        list[str] | None, typer.Option(help="Your own methods that tables have, as module:Class or file.py:Class.")
    ] = None,
    algorithm: Annotated[
        list[str] | None, typer.Option(help="Your own training algorithms that tables have, in the same way.")
    ] = None,
) -> None:
    """Write one self-contained page with every table and figure that a folder holds."""
    with one_sentence():
        from adanpc.lab.adapt import find
        from adanpc.lab.networks import find_encoder
        from adanpc.lab.sweep.subjects import Workspace
        from adanpc.lab.tables.workflow import write_report
        from adanpc.lab.train import find as find_algorithm

        if encoder:
            find_encoder(encoder)
        for name in method or ():
            find(name)
        for name in algorithm or ():
            find_algorithm(name)
        workspace = Workspace(data_dir or Path("data"), folder)
        path = write_report(workspace, where_made=data_dir is None)
        typer.echo(str(path))


def _ask(name: str, estimate: Estimate) -> None:
    """Asks whether to start; ends the program if the answer is no, or if nobody can answer."""
    from adanpc.lab.tables.scale import length

    if not sys.stdin.isatty():
        raise AdaNPCError(
            f"{name} at the paper's size takes about {length(estimate.seconds)}: choose a `scale` or a `budget`, or "
            "pass --yes to start anyway"
        )
    if not typer.confirm("This is the paper's size; --scale and --budget choose another. Start?", err=True):
        raise typer.Exit(REFUSED)


def list_tables(*, as_json: bool = False) -> None:
    """Prints one line per table."""
    from adanpc.lab.tables import TABLES

    if as_json:
        fields = ("name", "title", "paper_place", "data", "rows")
        print_json([{field: getattr(each, field) for field in fields} for each in TABLES.values()])
        return
    width = max(len(name) for name in TABLES)
    for each in TABLES.values():
        typer.echo(f"{each.name:{width}}  {each.title} ({each.paper_place})")


def show(exhibit: Exhibit) -> None:
    """Prints the tables and notes of an exhibit; charts and galleries are only written to files."""
    from adanpc.lab.show import render
    from adanpc.lab.show.exhibit import Sheet

    console = Console(highlight=False)
    console.print(Text(on_one_line(f"{exhibit.title}. {exhibit.about}")))
    for part in exhibit.parts:
        if isinstance(part, Sheet):
            grid = _grid(part)
            width = max(console.width, UNLIMITED.measure(grid).maximum)
            Console(highlight=False, width=width).print(grid)
            for line in render.legend(part):
                console.print(Text(on_one_line(line)))
    for note in exhibit.notes:
        console.print(Text(on_one_line(f"Note: {note}")))


def _grid(sheet: Sheet) -> Grid:
    """A sheet for the terminal. Everything is a Text, because rich reads brackets in a string as markup."""
    from adanpc.lab.show import render

    title = Text(on_one_line(render.heading(sheet)), style="table.title")
    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, title=title, title_justify="left")
    grid.add_column("", justify="left", no_wrap=True)
    for heading in sheet.columns:
        grid.add_column(Text(on_one_line(heading)), justify="right", no_wrap=True)
    for (label, _), row in zip(sheet.rows, render.shown(sheet), strict=True):
        cells = [_text(cell) for cell in row]
        grid.add_row(Text(on_one_line(label)), *cells)
    return grid


def _text(cell: Shown) -> Text:
    """Our number, bold if it is the best, and the paper's."""
    text = Text(on_one_line(cell.ours))
    if cell.best:
        text.stylize("bold")
    if cell.paper:
        text.append(f" {cell.paper}", style="dim")
    return text
