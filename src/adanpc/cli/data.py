"""``adanpc data``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from adanpc.cli.app import REFUSED, app, one_sentence
from adanpc.lab.data import DataSet, read, unreadable


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="The data set, such as pacs; a wrong name lists all.")],
    data_dir: Annotated[Path, typer.Option(help="The folder that holds the data set.")] = Path("data"),
    check: Annotated[bool, typer.Option(help="Also decode every image, and name those that cannot be.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Deals digits to angles, and makes corruptions.")] = 0,
) -> None:
    """Show a data set: its domains, classes and sizes."""
    with one_sentence():
        found = read(name, data_dir, seed=seed)
        Console(highlight=False).print(_table(found))
        if found.notice:
            typer.echo(found.notice)
        if check and (bad := unreadable(found)):
            typer.echo("\n".join(bad))
            typer.echo(f"{len(bad)} images cannot be read: delete them, or copy them again.", err=True)
            raise typer.Exit(REFUSED)


def _table(found: DataSet) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, title=found.name, title_justify="left")
    for heading in ("domain", "images", "classes"):
        table.add_column(heading, justify="left" if heading == "domain" else "right")
    for domain in found.domains:
        table.add_row(domain.name, f"{len(domain):,}", f"{len(domain.labels.unique())} of {len(found.classes)}")
    return table
