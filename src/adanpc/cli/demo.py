"""``adanpc demo``: adapt to rotated digits, and show a table and a figure."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from adanpc.cli.app import app, one_sentence
from adanpc.cli.names import DEMO_EPOCHS, DEMO_SEED

if TYPE_CHECKING:
    from adanpc.lab.demo import Result

MIN_COLUMNS = 80  # the table needs this width, even if the terminal is narrower


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to write the figure: a .png, .pdf or .svg file.")] = Path("demo.png"),
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed.")] = DEMO_SEED,
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs to train the network.")] = DEMO_EPOCHS,
) -> None:
    """Train on upright digits, then adapt to digits that are rotated further and further, in about 90 seconds.

    A table and a figure compare four methods on each rotation: a linear head, a frozen k-NN vote, the paper's rule, and
    AdaNPC with the library's defaults. They also show how well upright digits are still recognized afterward.
    """
    with one_sentence():
        from adanpc.lab.data.digits import rotated_digits
        from adanpc.lab.demo import Settings, check_plot, draw, successive

        check_plot(out)
        start = time.perf_counter()
        typer.echo("Training on upright digits, then adapting to rotated ones.", err=True)
        result = successive(rotated_digits(seed=seed), Settings(seed=seed, epochs=epochs))
        _show(result, time.perf_counter() - start)
        draw(result, out)
        typer.echo(f"Figure: {out}")


def _show(result: Result, seconds: float) -> None:
    """Prints the table, the size of the bank and the settings."""
    console = Console(highlight=False)
    console.width = max(console.width, MIN_COLUMNS)
    console.print(_table(result))
    before = result.stages[0].rows
    after = result.stages[-1].rows
    joined = [f"{after[method] - before[method]:,} joined by {method}" for method in after]
    settings = [f"{name.replace('_', ' ')} {value}" for name, value in asdict(result.settings).items()]
    console.print(f"Bank: {min(before.values()):,} source rows; {', '.join(joined)}. Time: {seconds:.0f} s.")
    console.print(f"Settings: {', '.join(settings)}.")


def _table(result: Result) -> Table:
    """A table of accuracies: a row per method, a column per domain, and columns for the source afterward."""
    from adanpc.lab.demo import METHODS

    domains = [f"{stage.domain}°" for stage in result.stages]
    first = domains[0]
    last = domains[-1]
    caption = (
        f"{first} … {last}: each domain as it arrives ({first}: held-out digits); mean: over the rotated ones. "
        f"Source: after {last}, on the training digits, on the same digits without the vote of their own row, and on "
        "held-out digits. Only the last two methods learn; the source numbers of the first two are also those before."
    )
    table = Table(
        title="Accuracy (%)",
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    table.add_column("", no_wrap=True)
    for heading in (*domains, "mean", "source\ntrain", "no own\nrow", "held\nout"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=len("100.0"))
    for method in METHODS:
        table.add_row(method, *_cells(result, method))
    return table


def _cells(result: Result, method: str) -> list[str]:
    """The accuracies of a method in the order of the columns."""
    from adanpc.lab.demo import HEAD

    cells = [_percent(stage.accuracy[method]) for stage in result.stages]
    cells.append(_percent(result.average(method)))
    afterwards = result.stages[-1].on_source[method]
    cells.append(_percent(afterwards.training))
    if method == HEAD:
        cells.append("–")  # a head has no rows
    else:
        cells.append(_percent(afterwards.without_own_row))
    cells.append(_percent(afterwards.held_out))
    return cells


def _percent(number: float) -> str:
    return f"{number:.1f}"
