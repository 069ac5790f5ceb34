"""``adanpc train``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from adanpc.cli.app import app, one_sentence, settings
from adanpc.lab.own import is_own, split_name
from adanpc.lab.train.assemble import Prepared, prepare
from adanpc.lab.train.loop import train as train_run
from adanpc.lab.train.process_group import process_group
from adanpc.lab.train.run import Run, check_vacant
from adanpc.lab.train.spec import Spec


@app.command()
def train(
    data: Annotated[str, typer.Option(help="The data set, such as rotated-mnist; a wrong name lists all.")] = "",
    target: Annotated[list[str] | None, typer.Option(help="A domain not to train on; may be repeated.")] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="Such as knn, or your own: module:Class or file.py:Class; erm by default. A wrong name lists all."
        ),
    ] = None,
    encoder: Annotated[str, typer.Option(help="Such as convnet; by default what is usual for the data.")] = "",
    data_dir: Annotated[Path, typer.Option(help="The folder that holds the data set.")] = Path("data"),
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default a new one below runs/.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates.")] = Spec.steps,
    batch_size: Annotated[int, typer.Option(min=0, help="Rows of each domain in a step; 0: what is usual.")] = 0,
    every: Annotated[int, typer.Option(min=1, help="Evaluate and save after this many steps.")] = Spec.every,
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
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue this run; its own settings apply. Repeat an --algorithm of your own."),
    ] = None,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that read images.")] = None,
    tensorboard: Annotated[bool, typer.Option(help="Also write scalars for TensorBoard.")] = False,
) -> None:
    """Train a source model on all domains but the targets.

    Ctrl-C saves; --resume continues as if nothing had happened. Under torchrun several processes train one model:
    torchrun --nproc-per-node 2 -m adanpc train …
    """
    with one_sentence(), process_group(device) as group:
        targets = tuple(target or ())
        name = Spec.algorithm if algorithm is None else algorithm
        folder = resume or out or _default_folder(data, name, targets, seed)
        prepared: Prepared | None = None
        if resume is None and group.rank == 0:
            spec = Spec(
                data,
                targets,
                name,
                encoder,
                steps=steps,
                batch=batch_size,
                every=every,
                seed=seed,
                hyper=settings(set_ or []),
                trial=trial,
                pretrained=pretrained,
                weights=None if weights is None else str(weights),
                norm=norm,
                dropout=dropout,
                frozen_batchnorm=frozen_batchnorm,
                augment=augment,
            )
            check_vacant(folder)
            # Everything is read and built before there is a folder: what cannot be trained leaves none behind.
            prepared = prepare(spec, data_dir, group.device)
            Run.create(folder, prepared.spec, prepared.description)
            if prepared.data.notice:
                typer.echo(prepared.data.notice, err=True)
        group.wait()  # until process 0 has created the run
        run = Run(folder, algorithm)
        with one_sentence(f"Stopped and saved; continue with: {_command_to_resume(run)}"):
            record = train_run(run, group, prepared=prepared, workers=workers, tensorboard=tensorboard)
        if group.rank == 0:
            Console(highlight=False).print(_table(run, record))
            typer.echo(f"After {record['step']:,} steps, {record['seconds']:.0f} s. Held out: a fifth of each domain.")
            typer.echo(f"Run: {folder}")


def _default_folder(data: str, algorithm: str, targets: Sequence[str], seed: int) -> Path:
    """Returns where a run is kept unless --out says otherwise."""
    if is_own(algorithm):
        _, algorithm = split_name(algorithm)  # the class alone: a path cannot be part of the folder's name
    return Path("runs") / "-".join([data, algorithm, *targets, str(seed)])


def _command_to_resume(run: Run) -> str:
    command = f"adanpc train --resume {run.folder}"
    if is_own(run.spec.algorithm):
        command += f" --algorithm {run.spec.algorithm}"
    return command


def _table(run: Run, record: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, title="Accuracy (%)", title_justify="left")
    table.add_column("domain")
    table.add_column("")
    table.add_column("held out", justify="right")
    table.add_column("rest", justify="right")
    for name, held_out in record["held_out"].items():
        if name in run.spec.targets:
            table.add_row(name, "target", f"{held_out:.1f}", f"{record['target'][name]:.1f}")
        else:
            table.add_row(name, "source", f"{held_out:.1f}", "")
    return table
