"""``adanpc train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from adanpc.cli.app import app, one_sentence, settings
from adanpc.lab.train.assemble import start
from adanpc.lab.train.loop import train as fit
from adanpc.lab.train.run import Run
from adanpc.lab.train.spec import Spec
from adanpc.lab.train.team import team


@app.command()
def train(
    data: Annotated[str, typer.Option(help="The data set, such as rotated-mnist; a wrong name lists all.")] = "",
    target: Annotated[list[str] | None, typer.Option(help="A domain not to train on; may be repeated.")] = None,
    algorithm: Annotated[str, typer.Option(help="Such as erm or knn; a wrong name lists all.")] = "erm",
    encoder: Annotated[str, typer.Option(help="Such as convnet; by default what is usual for the data.")] = "",
    data_dir: Annotated[Path, typer.Option(help="The folder that holds the data set.")] = Path("data"),
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default a new one below runs/.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates.")] = Spec.steps,
    batch_size: Annotated[int, typer.Option(min=0, help="Rows of each domain in a step; 0: what is usual.")] = 0,
    every: Annotated[int, typer.Option(min=1, help="Evaluate and save after so many steps.")] = Spec.every,
    seed: Annotated[int, typer.Option(min=0, help="Decides every random choice.")] = 0,
    trial: Annotated[int, typer.Option(min=0, help="Draws settings from the search space; 0: defaults.")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the algorithm, as name=value; may be repeated.")
    ] = None,
    pretrained: Annotated[bool | None, typer.Option(help="Start from published weights.")] = None,
    weights: Annotated[Path | None, typer.Option(help="A file of weights to start from.")] = None,
    norm: Annotated[bool, typer.Option(help="A BatchNorm between encoder and head.")] = False,
    dropout: Annotated[float, typer.Option(min=0, max=1, help="Of the features.")] = 0.0,
    frozen_batchnorm: Annotated[bool, typer.Option(help="Keep the statistics of the encoder.")] = False,
    augment: Annotated[bool | None, typer.Option(help="Random crops, flips and colors.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run; its own settings hold.")] = None,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that read images.")] = None,
    tensorboard: Annotated[bool, typer.Option(help="Also write scalars for TensorBoard.")] = False,
) -> None:
    """Train a source model on all domains but the targets.

    Ctrl-C saves; --resume continues as if nothing had been. Under torchrun several processes train one model:
    torchrun --nproc-per-node 2 -m adanpc train …
    """
    with one_sentence(), team(device) as place:
        folder = resume or out or Path("runs") / "-".join([data, algorithm, *(target or ()), str(seed)])
        if resume is None and place.rank == 0:
            spec = Spec(
                data,
                tuple(target or ()),
                algorithm,
                encoder,
                steps,
                batch_size,
                every,
                seed,
                settings(set_ or []),
                trial,
                pretrained,
                None if weights is None else str(weights),
                norm,
                dropout,
                frozen_batchnorm,
                augment,
            )
            notice = start(spec, data_dir, folder).data["notice"]
            if notice:
                typer.echo(notice, err=True)
        place.wait()
        with one_sentence(f"Stopped and saved; continue with: adanpc train --resume {folder}"):
            record = fit(run := Run(folder), place, workers=workers, tensorboard=tensorboard)
        if place.rank == 0:
            Console(highlight=False).print(_table(run, record))
            typer.echo(f"After {record['step']:,} steps, {record['seconds']:.0f} s. Held out: a fifth of each domain.")
            typer.echo(f"Run: {folder}")


def _table(run: Run, record: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, title="Accuracy (%)", title_justify="left")
    for heading in ("domain", "", "held out", "rest"):
        table.add_column(heading, justify="right" if heading in ("held out", "rest") else "left")
    for name, value in record["held_out"].items():
        role = "target" if name in run.spec.targets else "source"
        rest = record["target"].get(name)
        table.add_row(name, role, f"{value:.1f}", "" if rest is None else f"{rest:.1f}")
    return table
