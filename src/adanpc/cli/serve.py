"""``adanpc serve``: a durable bank over HTTP; ``adanpc sample``: one to try; ``adanpc token``: who may use it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adanpc.cli.app import app, one_sentence, print_json
from adanpc.cli.names import ENCODERS, completing
from adanpc.errors import AdaNPCError
from adanpc.printable import on_one_line

if TYPE_CHECKING:
    from adanpc.serve.encoding import Encoder
    from adanpc.store import DurableBank

PORT = 8080
BEST = "best"  # the model of a run that is used unless another is named
ROLES = ("predict", "expert", "admin")  # as in adanpc.serve.tokens, which is slow to import

token = typer.Typer(no_args_is_help=True, help="Manage the tokens that decide who may use a service.")
app.add_typer(token, name="token")

TokenFile = Annotated[Path, typer.Argument(help="The file that holds the hashes of the tokens.")]
TokenName = Annotated[str, typer.Argument(help="The owner of the token; changes are signed with this name.")]


@app.command()
def serve(
    folder: Annotated[Path, typer.Argument(help="The folder of a durable bank; see adanpc bank create.")],
    model: Annotated[Path | None, typer.Option(help="The run whose model turns images into features.")] = None,
    which: Annotated[str, typer.Option(help="Which model of the run to use: best or last.")] = BEST,
    encoder: Annotated[
        str,
        typer.Option(
            help="An encoder instead of a run, such as resnet-18 or timm:NAME.", autocompletion=completing(ENCODERS)
        ),
    ] = "",
    weights: Annotated[Path | None, typer.Option(help="A file of weights for the --encoder.")] = None,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Use the published weights of the --encoder.")
    ] = False,
    images: Annotated[
        Path | None,
        typer.Option(help="The images or the run that the bank was created from, to show pictures of source rows."),
    ] = None,
    thumbnails: Annotated[
        bool, typer.Option("--thumbnails", help="Keep thumbnails of the images that join the bank.")
    ] = False,
    host: Annotated[str, typer.Option(help="The address to listen on; all except loopback need --tokens.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 picks a free one.")] = PORT,
    tokens: Annotated[Path | None, typer.Option(help="Who may do what: a file made by adanpc token add.")] = None,
    max_body: Annotated[int, typer.Option(min=1, help="The largest request, in bytes.")] = 32 * 2**20,
    max_pixels: Annotated[int, typer.Option(min=1, help="The largest image, in pixels.")] = 50_000_000,
    max_requests: Annotated[int, typer.Option(min=1, help="The most requests to answer at once.")] = 256,
    max_connections: Annotated[int, typer.Option(min=1, help="The most connections to keep open at once.")] = 1000,
    rate: Annotated[float, typer.Option(min=0.001, help="The most requests per second from one caller.")] = 2000.0,
) -> None:
    """Answer predictions over HTTP, adapt while doing so, and show experts why.

    The page for experts is at the printed address. SIGTERM or Ctrl-C stops the service once it has answered every
    request that it accepted. Logs go to standard error, as JSON lines.
    """
    with one_sentence():
        _check_libraries()
        from adanpc.serve import Limits, Tokens
        from adanpc.serve.logs import log_to_stderr
        from adanpc.serve.security import LOOPBACK
        from adanpc.store import Thumbnails

        if not encoder and (weights is not None or pretrained):
            raise AdaNPCError("--weights and --pretrained are for an --encoder: name it, or omit them")
        if model is None and which != BEST:
            raise AdaNPCError(f"--which {which} is for a --model: pass its run, or omit --which")
        known = None
        if tokens is not None:
            known = Tokens(tokens)
        elif host not in LOOPBACK:
            raise AdaNPCError(
                f"anyone who can reach {host} could change the bank: create tokens with adanpc token add, and pass "
                "their file as --tokens"
            )
        limits = Limits(
            body=max_body,
            pixels=max_pixels,
            requests=max_requests,
            connections=max_connections,
            rate=rate,
            burst=max(2 * rate, 1.0),
        )
        options: dict[str, Any] = {"limits": limits, "tokens": known, "folder": folder}
        if images is not None:
            from adanpc.lab.serving import image_finder

            options["image_of_key"] = image_finder(images)

        def complete(bank: DurableBank) -> dict[str, Any]:
            """The options that depend on the bank."""
            if model is not None or encoder:
                options["encoder"] = _encoder(bank, model, which, encoder, weights, pretrained)
            if thumbnails:
                options["thumbnails"] = Thumbnails(folder)
            return options

        log_to_stderr()
        _answer(folder, host, port, complete)


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(help="Where the sample is made; later calls use it again.")] = Path(
        "adanpc-sample"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 picks a free one.")] = PORT,
) -> None:
    """Serve a sample to try: drawn pictures of six things, in a style that the model has not seen.

    The first call draws the pictures, trains a small network and sends the service a stream of pictures, in about a
    minute. Ctrl-C stops the service; the next call continues with the same bank.
    """
    with one_sentence():
        _check_libraries()
        from adanpc.lab.sample import ask, make
        from adanpc.lab.serving import encoder_of_run, image_encoder, image_finder
        from adanpc.serve.logs import log_to_stderr
        from adanpc.store import Thumbnails

        made = make(folder)

        def complete(bank: DurableBank) -> dict[str, Any]:
            """The options of the service for this bank."""
            network = encoder_of_run(made.run, BEST)
            return {
                "encoder": image_encoder(network, bank.recipe, bank.contents.settings.dim),
                "image_of_key": image_finder(made.run),
                "thumbnails": Thumbnails(made.bank),
                "folder": made.bank,
            }

        def follow(address: str, bank: DurableBank) -> None:
            """Sends pictures in the background, because the service begins to answer only after this has returned."""
            is_new = len(bank.contents) == made.source_rows
            Thread(target=ask, args=(address, made, is_new), daemon=True).start()

        log_to_stderr(logging.WARNING)
        _answer(made.bank, "127.0.0.1", port, complete, follow)


def _check_libraries() -> None:
    from adanpc.require import library

    for name in ("fastapi", "uvicorn", "prometheus_client", "PIL"):
        library(name, "a service", extra="serve")


def _answer(
    folder: Path,
    host: str,
    port: int,
    complete: Callable[[DurableBank], dict[str, Any]],
    follow: Callable[[str, DurableBank], None] | None = None,
) -> None:
    """Opens a bank, prints where it is served, and answers requests until a signal stops it.

    Args:
        folder: the folder of the bank.
        host: the host to listen on.
        port: the port to listen on.
        complete: gives the options of ``create`` for the bank.
        follow: called with the address and the bank before the service begins to answer.
    """
    from adanpc.serve import create, ended_by_signals, listening, run
    from adanpc.store import DurableBank

    with ended_by_signals(), listening(host, port) as opened, DurableBank.open(folder) as bank:
        service = create(bank, **complete(bank))
        for notice in bank.notices:
            typer.echo(f"Note: {on_one_line(notice)}.", err=True)
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{opened.getsockname()[1]}"
        typer.echo(f"Serving {folder} at {address}")
        if follow is not None:
            follow(address, bank)
        run(service, opened)


def _encoder(
    bank: DurableBank, model: Path | None, which: str, name: str, weights: Path | None, pretrained: bool
) -> Encoder:
    """The encoder that turns images into features, after checking that it made the features of the bank."""
    from adanpc.lab.networks import find_encoder
    from adanpc.lab.serving import encoder_of_name, encoder_of_run, image_encoder

    known = bank.contents.settings
    if model is not None and name:
        raise AdaNPCError("--model and --encoder both make features: pass only one of them")
    if model is not None:
        network = encoder_of_run(model, which)
    else:
        find_encoder(name)
        network = encoder_of_name(name, known.classes, weights=weights, pretrained=pretrained)
    return image_encoder(network, bank.recipe, known.dim)


@token.command("add")
def add(
    file: TokenFile,
    name: TokenName,
    role: Annotated[
        str,
        typer.Option(
            help="What the token allows: predict; expert, which also allows changes to the bank; or admin.",
            autocompletion=completing(ROLES),
        ),
    ] = "predict",
) -> None:
    """Create a token and print it. It cannot be shown again, because the file keeps only its hash."""
    with one_sentence():
        _check_libraries()
        from adanpc.serve.tokens import add_token

        typer.echo(add_token(file, name, role))


@token.command("list")
def list_tokens(file: TokenFile, json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the owners of the tokens, and what the tokens allow."""
    with one_sentence():
        _check_libraries()
        from adanpc.serve.tokens import read_tokens

        entries = read_tokens(file)
        if json:
            print_json({"tokens": [{"name": entry.name, "role": entry.role} for entry in entries]})
            return
        for entry in entries:
            typer.echo(f"{entry.role:8} {on_one_line(entry.name)}")


@token.command("remove")
def remove(file: TokenFile, name: TokenName) -> None:
    """Remove a token; a running service refuses it from then on."""
    with one_sentence():
        _check_libraries()
        from adanpc.serve.tokens import remove_token

        remove_token(file, name)
        typer.echo(f"Removed: the token of {on_one_line(name)} is refused from now on.")
