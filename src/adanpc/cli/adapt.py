"""``adanpc adapt``: compare test-time methods on images that a model was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from adanpc.cli.app import REFUSED, app, one_sentence, print_json, settings
from adanpc.cli.names import ENCODERS, METHODS, STREAMS, completing
from adanpc.errors import AdaNPCError
from adanpc.require import unknown

if TYPE_CHECKING:
    from adanpc.lab.data.streams import Stream
    from adanpc.lab.sweep.evaluation import Evaluation
    from adanpc.lab.train.run import Run

ALL = "all"
DEFAULT = "adanpc-safe"  # learns in the same way as a wrapped model
COLUMNS = 140  # the table needs this width, even if the terminal is narrower
MEASURES = ("mean", "worst", "ECE", "OOD", "source", "ms p50", "p99", "enc", "MB")  # the columns after the domains
LEGEND = (
    "Accuracy on each domain as its samples arrive; worst: over the worst tenth of windows of 100 answers; ECE: "
    "expected calibration error; OOD: how well confidence separates the images from shuffled ones (AUROC); source: on "
    "held-out source images after adapting (before); ms: per sample, without the encoder's time (enc) if the method "
    "sees features; MB: memory beyond the model."
)


@app.command()
def adapt(
    run: Annotated[
        Path | None, typer.Argument(help="The folder of a trained run; alternatively, pass --model.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="One or several methods, such as adanpc-safe t3a; all; or your own, as module:Class or file.py:Class. "
            "adanpc-safe learns as the library does; adanpc is the paper's rule. Default: adanpc-safe.",
            autocompletion=completing([*METHODS, ALL]),
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A file of weights instead of a run: the state_dict of the --encoder.")
    ] = None,
    encoder: Annotated[
        str,
        typer.Option(
            help="The network of the --model, such as resnet-18, timm:NAME or your own, as module:function; or the "
            "run's encoder if it is your own.",
            autocompletion=completing(ENCODERS),
        ),
    ] = "",
    source: Annotated[
        Path | None,
        typer.Option(help="The labeled images that the --model was trained on, as for --on; they fill the bank."),
    ] = None,
    on: Annotated[
        Path | None,
        typer.Option(
            help="The images to adapt to: a folder <class>/<image> or <domain>/<class>/<image>, or a CSV or Parquet "
            "file with path, label and perhaps domain. Default: the target domains of the run."
        ),
    ] = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Skip images that cannot be read, and report how many.")
    ] = False,
    stream: Annotated[
        str, typer.Option(help="How samples arrive: " + ", ".join(STREAMS) + ".", autocompletion=completing(STREAMS))
    ] = "successive",
    visits: Annotated[
        int | None, typer.Option(min=1, help="How often each domain comes back in the stream recurring. Default: 5.")
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="How many samples arrive together; one or several sizes. Default: 32."),
    ] = None,
    images: Annotated[int | None, typer.Option(min=1, help="The most images to use from each target domain.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of a method, as method.name=value; may be repeated.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="The run's algorithm, if it is your own; its code is executed only if you name it."),
    ] = None,
    data: Annotated[
        str, typer.Option(help="The run's data set, if it is your own, as module:function or file.py:function.")
    ] = "",
    which: Annotated[str, typer.Option(help="Which model of the run to use: best or last.")] = "best",
    seed: Annotated[int, typer.Option(min=0, help="Random seed for the order of arrival and for the methods.")] = 0,
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Where to keep the records of a --model. Default: a folder below runs/.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run test-time methods on images that a model was not trained on, and compare them.

    Each sample is answered as it arrives; labels are used only to score the answers. A fifth of each target domain is
    held back for selecting settings, as in training. Results that were measured before are reused.
    """
    stopped = "Stopped; run the same command again to continue with the methods that are not finished."
    with one_sentence(stopped, disk_full="run the same command again"):
        from adanpc.lab.train.process_group import known_device

        names = method or [DEFAULT]
        if ALL in names:
            names = list(METHODS)
        sizes = batch_size or [32]
        # Everything that was typed is checked before images are encoded, which may take minutes.
        own_settings = _settings_by_method(set_ or [], names)
        order = _stream(stream, seed, visits)
        place = known_device(device)
        if model is None:
            _refuse_together("a run", source=source, out=out)
            opened = _opened(run, algorithm, encoder, data)
            evaluation = _with_run(opened, on, which, images, place, skip_unreadable)
        else:
            _refuse_together("--model", run=run, algorithm=algorithm, data=data)
            evaluation = _with_weights(model, encoder, source, on, out, images, place, skip_unreadable)

        questions = []
        for size in sizes:
            for name in names:
                questions.append(
                    {
                        "method": name,
                        "settings": own_settings.get(name, {}),
                        "stream": order.describe(),
                        "batch_size": size,
                        "which": which,
                        "images": images,
                        "seed": seed,
                    }
                )
        records = _answers(evaluation, questions, order)
        if json:
            print_json({"records": records, "file": str(evaluation.records)})
        else:
            _show(records, evaluation.domains, images)
            typer.echo(f"Records: {evaluation.records}")
        if all("error" in record for record in records):
            raise typer.Exit(REFUSED)


def _settings_by_method(given: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The settings of each method from texts method.name=value, after checking that the methods take them."""
    from adanpc.lab.adapt import find
    from adanpc.lab.settings import check_settings

    by_method: dict[str, dict[str, Any]] = {}
    for key, value in settings(given).items():
        method, _, name = key.rpartition(".")  # at the last dot, because file.py:Class has one, too
        if method not in names:
            raise AdaNPCError(
                f"--set takes method.name=value with one of the methods {', '.join(names)}, got {key}={value}"
            )
        by_method.setdefault(method, {})[name] = value
    for name in names:
        check_settings(name, [find(name)], by_method.get(name, {}), ("source",))
    return by_method


def _stream(name: str, seed: int, visits: int | None) -> Stream:
    """The stream of this name."""
    from adanpc.lab.data import streams

    if name not in streams.STREAMS:
        raise AdaNPCError(unknown("stream", name, STREAMS))
    if visits is None:
        return streams.STREAMS[name](seed=seed)
    if name != streams.Recurring.name:
        raise AdaNPCError(f"--visits has no effect on the stream {name}: omit it, or use --stream recurring")
    return streams.Recurring(seed=seed, visits=visits)


def _refuse_together(with_what: str, **others: object) -> None:
    """Refuses options that would be ignored."""
    for name, value in others.items():
        if value:
            shown = "a run" if name == "run" else f"--{name}"
            raise AdaNPCError(f"{shown} has no effect together with {with_what}: omit one of them")


def _opened(folder: Path | None, algorithm: str | None, encoder: str, data: str) -> Run:
    """The run; the algorithm, encoder and data set are those that the user names because they are the user's own."""
    from adanpc.lab.train.run import Run

    if folder is None:
        raise AdaNPCError("there is no model to adapt: pass the folder of a run, or a file of weights as --model")
    return Run(folder, algorithm, encoder=encoder or None, data=data or None)


def _with_run(
    run: Run,
    on: Path | None,
    which: str,
    images: int | None,
    device: str,
    skip_unreadable: bool,
) -> Evaluation:
    """The evaluation of a run's model on its targets, or on other images."""
    from adanpc.lab.data import read_images
    from adanpc.lab.sweep.evaluation import of_run

    others = None
    if on is not None:
        others = read_images(on, skip_unreadable=skip_unreadable)
        _tell(others.notice)
    return of_run(run, others, which=which, images=images, device=device)


def _with_weights(
    model: Path,
    encoder: str,
    source: Path | None,
    on: Path | None,
    out: Path | None,
    images: int | None,
    device: str,
    skip_unreadable: bool,
) -> Evaluation:
    """The evaluation of the network in a file of weights on the user's own images."""
    from adanpc.lab.data import read_images
    from adanpc.lab.networks import find_encoder
    from adanpc.lab.sweep.evaluation import of_weights

    if not encoder or source is None or on is None:
        raise AdaNPCError(
            "--model also needs --encoder, --source with the images that it was trained on, and --on with the images "
            "to adapt to"
        )
    find_encoder(encoder)
    known = read_images(source, skip_unreadable=skip_unreadable)
    met = read_images(on, skip_unreadable=skip_unreadable)
    _tell(known.notice)
    _tell(met.notice)
    folder = out or Path("runs") / f"adapt-{model.stem}"
    return of_weights(model, encoder, known, met, folder, images=images, device=device)


def _tell(notice: str) -> None:
    if notice:
        typer.echo(f"Note: {notice}.", err=True)


def _answers(evaluation: Evaluation, questions: Sequence[dict[str, Any]], order: Stream) -> list[dict[str, Any]]:
    """One record per question: read from the file if it is there, else measured and added to the file."""
    from adanpc.lab.sweep.adaptation import adapt as measure

    scene = None
    records = []
    reused = 0
    for question in questions:
        record = evaluation.recall(question)
        if record is not None:
            reused += 1
            records.append(record)
            continue
        if scene is None:
            scene = evaluation.scene()
        try:
            measured = measure(
                scene, question["method"], order, question["batch_size"], question["settings"], question["seed"]
            )
        except AdaNPCError as error:
            if len(questions) == 1:
                raise  # with nothing to compare, the error alone is clearer than a table
            measured = {"error": str(error)}
        records.append(evaluation.note(question, measured))
    if reused:
        typer.echo(f"{reused} of {len(questions)} were measured before; read from {evaluation.records}.", err=True)
    return records


def _show(records: Sequence[dict[str, Any]], domains: Sequence[str], images: int | None) -> None:
    """Prints the table, the meaning of its columns, and why methods were refused."""
    console = Console(highlight=False)
    console.width = max(console.width, COLUMNS)
    console.print(_table(records, domains))
    if images is None:
        typer.echo(LEGEND)
    else:
        typer.echo(f"{LEGEND} Reduced: at most {images:,} images of each domain.")
    for record in records:
        if "error" in record:
            console.print(f"{record['method']}, batches of {record['batch_size']}: {record['error']}", markup=False)


def _table(records: Sequence[dict[str, Any]], domains: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), title="Accuracy (%)", title_justify="left")
    table.add_column("method", justify="left", no_wrap=True)
    for heading in ("batch", *domains, *MEASURES):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in records:
        _, _, method = record["method"].rpartition(":")  # only the class, if it is the user's own
        table.add_row(method, str(record["batch_size"]), *_cells(record, domains))
    return table


def _cells(record: dict[str, Any], domains: Sequence[str]) -> list[str]:
    """The cells of a row, after those of the method and the batch size: the domains and then ``MEASURES``."""
    if "error" in record:
        return ["–"] * (len(domains) + len(MEASURES))
    before = record["source"]["before"]
    *_, after = record["source"]["after"].values()  # after the last domain
    by_domain = [_percent(record["domains"].get(name)) for name in domains]
    measures = [
        _percent(record["average"]),
        _percent(record.get("worst_tenth")),
        _percent(record.get("calibration_error")),
        _percent(record.get("ood_auroc")),
        f"{after:.1f} ({before:.1f})",
        f"{record['ms']['p50']:.2f}",
        f"{record['ms']['p99']:.2f}",
        f"{record['encoder_ms']:.2f}",
        f"{record['extra_bytes'] / 1e6:.1f}",
    ]
    return by_domain + measures


def _percent(number: float | None) -> str:
    """The number as text, or a dash if there is none, as in records of earlier versions."""
    return "–" if number is None else f"{number:.1f}"
