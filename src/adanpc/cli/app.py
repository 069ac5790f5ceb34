"""What all commands share: the application, errors in one line, and how options are read."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import ENOSPC
from math import isfinite
from typing import Annotated, Any

import typer

from adanpc.errors import AdaNPCError
from adanpc.printable import on_one_line
from adanpc.version import __version__

STOPPED = 130  # the exit code that shells expect after Ctrl-C
REFUSED = 2  # the exit code of every error, as of a wrong option
REPEATED = ("--method", "--batch-size", "--target", "--set", "--only")
ARGUMENTS = (  # arguments of the library that are flags here
    "algorithm",
    "budget",
    "capacity",
    "data",
    "device",
    "encoder",
    "every",
    "images",
    "method",
    "preset",
    "scale",
    "seed",
    "seeds",
    "steps",
    "storage",
    "stream",
    "to",
    "trial",
    "trials",
    "which",
    "workers",
)

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def main() -> None:
    """Runs the command line."""
    app(spread(sys.argv[1:]), prog_name="adanpc")


def spread(arguments: Sequence[str]) -> list[str]:
    """Turns ``--method a b`` into ``--method a --method b``, and likewise for every option that may be repeated."""
    result: list[str] = []
    option = ""  # the repeatable option whose values are being read
    for argument in arguments:
        if argument.startswith("-"):
            option = argument if argument in REPEATED else ""
        elif option and result[-1] != option:
            result.append(option)
        result.append(argument)
    return result


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
def one_sentence(stopped: str = "Stopped.", disk_full: str = "") -> Iterator[None]:
    """Ends the program with one line, instead of a traceback, if the cause is outside the program.

    Args:
        stopped: the message after Ctrl-C.
        disk_full: what to do once there is space again on a full disk; it ends the sentence of the message.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(stopped, err=True)
        raise typer.Exit(STOPPED) from None
    except BrokenPipeError:
        raise  # the reader has gone, as in `adanpc … | head`: nobody is left to tell
    except OSError as error:
        message = on_one_line(_without_number(error))
        if error.errno == ENOSPC and disk_full:
            message = f"{message}; nothing that was saved is lost: free some space, then {disk_full}"
        typer.echo(f"adanpc: {message}", err=True)
        raise typer.Exit(REFUSED) from None
    except AdaNPCError as error:
        message = with_flags(on_one_line(str(error)))
        typer.echo(f"adanpc: {message}", err=True)
        raise typer.Exit(REFUSED) from None


def _without_number(error: OSError) -> str:
    """What went wrong and with which file, without the error number, which adds nothing."""
    if not error.strerror:
        return str(error)
    if error.filename is None:
        return error.strerror
    return f"{error.strerror}: {str(error.filename)!r}"


def print_json(document: Any) -> None:
    """Prints a result for other programs, as JSON in plain ASCII; NaN and infinities, which JSON lacks, become null."""
    typer.echo(json.dumps(_without_nan(document), indent=1))


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return value


def with_flags(message: str) -> str:
    """A message of the library, which speaks of arguments, reworded for a user who types flags.

    The library puts the name of an argument in backquotes, or begins the message with it: ``scale must be one of …``.
    """
    message = re.sub(r"`(\w+)`", lambda match: _flag(match[1]), message)
    name = message.partition(" must ")[0]
    if name in ARGUMENTS:
        message = _flag(name) + message.removeprefix(name)
    return message


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings(given: Sequence[str]) -> dict[str, Any]:
    """The settings in texts name=value; a value that is not valid JSON, such as 0.1, true or null, is a string."""
    result = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise AdaNPCError(f"--set takes name=value, got {text!r}")
        try:
            result[name] = json.loads(value)
        except ValueError:
            result[name] = value
    return result
