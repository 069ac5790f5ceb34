"""``adanpc train``: train a source model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from adanpc.cli.app import STOPPED, app, one_sentence, print_json, settings
from adanpc.cli.names import ALGORITHMS, DATA_SETS, ENCODERS, STEPS, completing
from adanpc.errors import AdaNPCError

if TYPE_CHECKING:
    from adanpc.lab.train.assemble import Prepared
    from adanpc.lab.train.run import Run

RESUMING = (  # options that may be given with --resume
    "resume",
    "algorithm",
    "encoder",
    "data",
    "device",
    "workers",
    "tensorboard",
    "json",
)


@app.command()
def train(
    context: typer.Context,
    data: Annotated[
        str,
        typer.Option(
            help=f"One of: {', '.join(DATA_SETS)}; or your own, as module:function or file.py:function.",
            autocompletion=completing(DATA_SETS),
        ),
    ] = "",
    target: Annotated[
        list[str] | None, typer.Option(help="A domain to hold out from training; may be repeated.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help=f"One of: {', '.join(ALGORITHMS)}; or your own, as module:Class or file.py:Class. Default: erm.",
            autocompletion=completing(ALGORITHMS),
        ),
    ] = None,
    encoder: Annotated[
        str,
        typer.Option(
            help="The network, such as convnet or timm:NAME; or your own, as module:function or file.py:function. "
            "Default: the usual one for the data set.",
            autocompletion=completing(ENCODERS),
        ),
    ] = "",
    data_dir: Annotated[Path, typer.Option(help="The folder that holds the data set.")] = Path("data"),
    out: Annotated[Path | None, typer.Option(help="The folder of the run. Default: a new one in runs/.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = STEPS,
    batch_size: Annotated[
        int, typer.Option(min=0, help="Samples per domain in each step; 0 uses the usual number.")
    ] = 0,
    every: Annotated[
        int, typer.Option(min=0, help="Evaluate and save after this many steps; 0 uses the usual number.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    trial: Annotated[
        int, typer.Option(min=0, help="Which random draw of hyperparameters to use; 0 uses the defaults.")
    ] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the algorithm, as name=value; may be repeated.")
    ] = None,
    pretrained: Annotated[bool | None, typer.Option(help="Start from published weights.")] = None,
    weights: Annotated[Path | None, typer.Option(help="A file of weights to start from.")] = None,
    norm: Annotated[bool, typer.Option(help="Put a BatchNorm layer between encoder and head.")] = False,
    dropout: Annotated[float, typer.Option(min=0, max=1, help="Dropout rate of the features.")] = 0.0,
    frozen_batchnorm: Annotated[bool, typer.Option(help="Keep the BatchNorm statistics of the encoder fixed.")] = False,
    straight_resize: Annotated[
        bool, typer.Option("--straight-resize", help="Resize images to a square without cropping, as DomainBed does.")
    ] = False,
    augment: Annotated[bool | None, typer.Option(help="Augment with random crops, flips and colors.")] = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Skip images that cannot be read, and report how many.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue this run with its own settings; pass --algorithm, --encoder or --data again if it is your "
            "own."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train, such as cpu or cuda.")] = "cpu",
    workers: Annotated[int | None, typer.Option(min=0, help="Number of processes that read images.")] = None,
    tensorboard: Annotated[bool, typer.Option(help="Also write scalars for TensorBoard.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train a source model on all domains except the targets.

    Ctrl-C saves the run; --resume continues it as if nothing had happened. Under torchrun several processes train one
    model: torchrun --nproc-per-node 2 -m adanpc train …
    """
    with one_sentence():
        if resume is not None:
            _refuse_other_options(context)
        elif not data:
            raise AdaNPCError(
                "there is no data to train on: pass --data, such as --data rotated-mnist, or --resume to continue a run"
            )
        from adanpc.lab.train.assemble import prepare
        from adanpc.lab.train.loop import SavedInterrupt
        from adanpc.lab.train.loop import train as train_run
        from adanpc.lab.train.process_group import process_group
        from adanpc.lab.train.run import Run, check_vacant
        from adanpc.lab.train.spec import Spec

        with process_group(device) as group:
            targets = tuple(target or ())
            name = Spec.algorithm if algorithm is None else algorithm
            folder = resume or out or _default_folder(data, name, targets, seed, trial, steps)
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
                    weights=_text(weights),
                    norm=norm,
                    dropout=dropout,
                    frozen_batchnorm=frozen_batchnorm,
                    straight_resize=straight_resize,
                    augment=augment,
                )
                check_vacant(folder)
                # Everything is read and built before the folder is created, so that a failure leaves none behind.
                prepared = prepare(spec, data_dir, group.device, skip_unreadable=skip_unreadable)
                Run.create(folder, prepared.spec, prepared.description)
                if prepared.data.notice:
                    typer.echo(prepared.data.notice, err=True)
            group.wait()  # until process 0 has created the run
            run = Run(folder, algorithm, encoder=encoder or None, data=data or None)
            command = _command_to_resume(run)
            stopped = f"Stopped without saving; continue from the last save with: {command}"
            with one_sentence(stopped, disk_full=f"continue with: {command}"):
                try:
                    record = train_run(run, group, prepared=prepared, workers=workers, tensorboard=tensorboard)
                except SavedInterrupt:
                    if group.rank == 0:
                        typer.echo(f"Stopped and saved; continue with: {command}", err=True)
                    raise typer.Exit(STOPPED) from None
            if group.rank == 0:
                _show(run, record, as_json=json)


def _refuse_other_options(context: typer.Context) -> None:
    """Refuses options that would be ignored, because a resumed run has its own settings."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        if given and name not in RESUMING:
            flag = parameter.opts[0]
            raise AdaNPCError(
                f"--resume continues a run with its own settings, so {flag} cannot be given with it: "
                f"omit {flag}, or train a new run"
            )


def _text(path: Path | None) -> str | None:
    """The path as a spec holds it."""
    if path is None:
        return None
    return str(path)


def _default_folder(data: str, algorithm: str, targets: Sequence[str], seed: int, trial: int, steps: int) -> Path:
    """The folder of a run if --out does not name one."""
    from adanpc.lab.own import split_name

    # Of the user's own code only the class or function: a path cannot be part of the folder's name.
    _, algorithm = split_name(algorithm)
    _, data = split_name(data)
    parts = [data, algorithm, *targets, str(seed)]
    if trial:
        parts.append(f"trial{trial}")
    if steps != STEPS:
        parts.append(f"{steps}steps")
    return Path("runs") / "-".join(parts)


def _command_to_resume(run: Run) -> str:
    """The command that continues a run, with the user's own code named again."""
    from adanpc.lab.networks.encoders import is_own_encoder
    from adanpc.lab.own import is_own

    command = f"adanpc train --resume {run.folder}"
    if is_own(run.spec.algorithm):
        command += f" --algorithm {run.spec.algorithm}"
    if is_own_encoder(run.spec.encoder):
        command += f" --encoder {run.spec.encoder}"
    if is_own(run.spec.data):
        command += f" --data {run.spec.data}"
    return command


def _show(run: Run, record: dict[str, Any], *, as_json: bool) -> None:
    """Prints the last record of a run, and where the run is."""
    if as_json:
        print_json({"run": str(run.folder), "spec": run.spec.document(), **record})
        return
    Console(highlight=False).print(_table(run, record))
    typer.echo(f"After {record['step']:,} steps, {record['seconds']:.0f} s. Held out: a fifth of each domain.")
    typer.echo(f"Run: {run.folder}")


def _table(run: Run, record: dict[str, Any]) -> Table:
    by_head = "held_out_by_head" in record  # the run is judged by a vote, and the head is shown beside it
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, title="Accuracy (%)", title_justify="left")
    table.add_column("domain")
    table.add_column("")
    judges = [""]
    if by_head:
        judges = ["vote, ", "head, "]
    for part in ("held out", "rest"):
        for judge in judges:
            table.add_column(judge + part, justify="right")
    for name in record["held_out"]:
        kind = "target" if name in run.spec.targets else "source"
        cells = [_percent(record["held_out"], name)]
        if by_head:
            cells.append(_percent(record["held_out_by_head"], name))
        cells.append(_percent(record["target"], name))
        if by_head:
            cells.append(_percent(record["target_by_head"], name))
        table.add_row(name, kind, *cells)
    return table


def _percent(accuracies: dict[str, float], name: str) -> str:
    """The accuracy on a domain as text, or an empty string if it was not measured."""
    if name not in accuracies:
        return ""
    return f"{accuracies[name]:.1f}"
