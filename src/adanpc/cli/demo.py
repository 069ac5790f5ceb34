"""``adanpc demo``."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from adanpc.cli.app import app, one_sentence
from adanpc.lab.data.digits import rotated_digits
from adanpc.lab.demo import HEAD, METHODS, Result, Settings, check_plot, draw, successive

COLUMNS = 80  # the table needs them, whatever the terminal says


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the figure goes: .png, .pdf or .svg.")] = Path("demo.png"),
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Decides every random choice.")] = Settings.seed,
    epochs: Annotated[int, typer.Option(min=1, help="How long the network is trained.")] = Settings.epochs,
) -> None:
    """Train on upright digits, then meet digits that are rotated further and further: about 90 seconds.

    A table and a figure compare a linear head, a frozen k-NN vote and AdaNPC on each rotation, and show what is still
    known of the upright digits afterwards.
    """
    with one_sentence():
        check_plot(out)
        start = time.perf_counter()
        typer.echo("Training on upright digits, then adapting to rotated ones.", err=True)
        result = successive(rotated_digits(seed=seed), Settings(seed=seed, epochs=epochs))
        _show(result, time.perf_counter() - start)
        draw(result, out)
        typer.echo(f"Figure: {out}")


def _show(result: Result, seconds: float) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, COLUMNS)
    console.print(_table(result))
    rows = [stage.rows for stage in result.stages]
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(result.settings).items())
    console.print(f"Bank: {rows[0]:,} source rows, {rows[-1] - rows[0]:,} admitted. Time: {seconds:.0f} s.")
    console.print(f"Settings: {settings}.")


def _table(result: Result) -> Table:
    titles = [f"{stage.domain}°" for stage in result.stages]
    first, last = titles[0], titles[-1]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.title, table.title_justify, table.caption_justify = "Accuracy (%)", "left", "left"
    table.caption = (
        f"{first} … {last}: each domain as it is met ({first}: held-out digits); mean: of the rotated ones. "
        f"Source: after {last}, on the training digits, on the same when a digit's own row may not vote, and on "
        "held-out digits. Only AdaNPC adapts, so the other two rows are also the source before."
    )
    table.add_column("", no_wrap=True)
    for heading in (*titles, "mean", "source\ntrain", "no own\nrow", "held\nout"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=len("100.0"))
    for method in METHODS:
        table.add_row(method, *_cells(result, method))
    return table


def _cells(result: Result, method: str) -> list[str]:
    after = result.stages[-1].source[method]
    met = [*(stage.met[method] for stage in result.stages), result.average(method)]
    cells = [f"{value:.1f}" for value in (*met, after.training, after.without_own_row, after.held_out)]
    if method == HEAD:
        cells[-2] = "–"  # a head has no rows
    return cells
