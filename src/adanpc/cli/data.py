"""``adanpc data``: show and check a data set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from adanpc.cli.app import REFUSED, app, one_sentence, print_json
from adanpc.cli.names import DATA_SETS, completing
from adanpc.printable import spelled_out

if TYPE_CHECKING:
    from adanpc.lab.data import DataSet


@app.command()
def data(
    name: Annotated[
        str,
        typer.Argument(
            help=f"One of: {', '.join(DATA_SETS)}; or your own, as module:function or file.py:function.",
            autocompletion=completing(DATA_SETS),
        ),
    ],
    data_dir: Annotated[Path, typer.Option(help="The folder that holds the data set.")] = Path("data"),
    check: Annotated[bool, typer.Option(help="Also decode every image and list those that cannot be read.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for the angles of digits and for corruptions.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show a data set: its domains, classes and sizes."""
    with one_sentence():
        from adanpc.lab.data import find_data, read, unreadable

        find_data(name)
        data_set = read(name, data_dir, seed=seed)
        broken = unreadable(data_set) if check else ()
        if json:
            document = _document(data_set)
            if check:
                document["unreadable"] = list(broken)
            print_json(document)
        else:
            Console(highlight=False).print(_table(data_set))
            if data_set.notice:
                typer.echo(data_set.notice)
            for file in broken:
                typer.echo(spelled_out(file))
        if broken:
            typer.echo(f"Images that cannot be read: {len(broken):,}. Delete them, or copy them again.", err=True)
            raise typer.Exit(REFUSED)


def _document(data_set: DataSet) -> dict[str, Any]:
    domains = {}
    for domain in data_set.domains:
        counts = domain.labels.bincount(minlength=len(data_set.classes)).tolist()
        domains[domain.name] = dict(zip(data_set.classes, counts, strict=True))
    return {
        "name": data_set.name,
        "classes": list(data_set.classes),
        "domains": domains,
        "notice": data_set.notice,
        "digest": data_set.digest(),
    }


def _table(data_set: DataSet) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, title=data_set.name, title_justify="left")
    table.add_column("domain")
    table.add_column("images", justify="right")
    table.add_column("classes", justify="right")
    for domain in data_set.domains:
        domain_name = Text(spelled_out(domain.name))  # a Text, because rich reads brackets in a string as markup
        classes = f"{len(domain.labels.unique())} of {len(data_set.classes)}"
        table.add_row(domain_name, f"{len(domain):,}", classes)
    return table
