"""``adanpc data``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from adanpc.cli.app import REFUSED, app, one_sentence
from adanpc.lab.data import DataSet, read, unreadable
from adanpc.lab.data.printable import printable


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="The data set, such as pacs; a wrong name lists all.")],
    data_dir: Annotated[Path, typer.Option(help="The folder that holds the data set.")] = Path("data"),
    check: Annotated[bool, typer.Option(help="Also decode every image, and name those that cannot be read.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Decides which digit gets which angle, and makes corruptions.")] = 0,
) -> None:
    """Show a data set: its domains, classes and sizes."""
    with one_sentence():
        data_set = read(name, data_dir, seed=seed)
        Console(highlight=False).print(_table(data_set))
        if data_set.notice:
            typer.echo(data_set.notice)
        if check:
            _check_images(data_set)


def _check_images(data_set: DataSet) -> None:
    """Ends the program with the names of the files that cannot be decoded, if there are any."""
    files = unreadable(data_set)
    if not files:
        return
    for file in files:
        typer.echo(printable(file))
    typer.echo(f"{len(files)} images cannot be read: delete them, or copy them again.", err=True)
    raise typer.Exit(REFUSED)


def _table(data_set: DataSet) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, title=data_set.name, title_justify="left")
    table.add_column("domain")
    table.add_column("images", justify="right")
    table.add_column("classes", justify="right")
    for domain in data_set.domains:
        domain_name = Text(printable(domain.name))  # brackets in the name of a folder are no markup
        classes = f"{len(domain.labels.unique())} of {len(data_set.classes)}"
        table.add_row(domain_name, f"{len(domain):,}", classes)
    return table
