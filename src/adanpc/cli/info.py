"""``adanpc info``: versions, kernels and cores."""

from __future__ import annotations

import os
import platform
from importlib.metadata import distributions
from typing import Annotated, Any

import typer

from adanpc.cli.app import app, one_sentence, print_json
from adanpc.version import __version__

PACKAGES = ("torch", "numpy", "scikit-learn", "safetensors", "numkong", "faiss-cpu", "timm", "fastapi", "onnx")


@app.command()
def info(json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False) -> None:
    """Show what is in use: versions, kernels of the progressive search, cores and threads."""
    with one_sentence():
        document = _document()
        if json:
            print_json(document)
            return
        for name, value in document.items():
            typer.echo(f"{name}: {_line(value)}")


def _document() -> dict[str, Any]:
    """Everything that is shown, by name."""
    import torch

    from adanpc.index import kernels

    chosen_by = "speed"
    if kernels.WANTED:
        chosen_by = kernels.VARIABLE
    installed = {package.metadata["Name"].lower(): package.version for package in distributions()}
    return {
        "adanpc": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed.get(name, "not installed") for name in PACKAGES},
        "kernels": {
            "in use": kernels.chosen(),
            "available": kernels.paths(),
            "chosen by": chosen_by,
        },
        "cores": os.cpu_count(),
        "threads of torch": torch.get_num_threads(),
        "devices": ["cpu", *(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))],
    }


def _line(value: Any) -> str:
    """The value on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_line(part)}" for name, part in value.items())
    if isinstance(value, list):
        return " ".join(value)
    return str(value)
