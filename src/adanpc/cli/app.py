"""The command line's frame: what all commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from adanpc.errors import AdaNPCError
from adanpc.version import __version__

STOPPED = 130  # what shells expect after Ctrl-C
REFUSED = 2
REPEATED = ("--method", "--batch-size", "--target", "--set", "--only")

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def main() -> None:
    """Runs the command line."""
    app(spread(sys.argv[1:]), prog_name="adanpc")


def spread(arguments: Sequence[str]) -> list[str]:
    """``--method a b`` as ``--method a --method b``, and so for every option that may be repeated."""
    made: list[str] = []
    option = ""
    for argument in arguments:
        if argument.startswith("-"):
            option = argument if argument in REPEATED else ""
        elif option and made[-1] != option:
            made.append(option)
        made.append(argument)
    return made


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"adanpc {__version__}")
        raise typer.Exit


@app.callback()
def adanpc(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Adapt a trained classifier while it is used: a memory bank, a vote of the nearest rows, no gradients."""


@contextmanager
def one_sentence(stopped: str = "Stopped.") -> Iterator[None]:
    """Ends the program with one line instead of a traceback where the cause lies outside of it.

    Args:
        stopped: what is said after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(stopped, err=True)
        raise typer.Exit(STOPPED) from None
    except BrokenPipeError:
        raise
    except (AdaNPCError, OSError) as error:
        typer.echo(f"adanpc: {error}", err=True)
        raise typer.Exit(REFUSED) from None


def settings(given: Sequence[str]) -> dict[str, Any]:
    """Settings from texts name=value; a value is a number, true, false or null if it reads as one, else a text."""
    made = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise AdaNPCError(f"--set takes name=value, got {text!r}")
        try:
            made[name] = json.loads(value)
        except ValueError:
            made[name] = value
    return made
