"""The features of whole domains, computed once and optionally cached on disk."""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adanpc.files import held
from adanpc.lab.data.domain import Domain
from adanpc.lab.data.loading import chunks
from adanpc.lab.networks.sealed import SealError, read_sealed, write_sealed
from adanpc.lab.networks.source import SourceModel
from adanpc.models.recipe import describe, fingerprint
from adanpc.progress import track

FORMAT = "adanpc-features"
VERSION = 1
BATCH = 64  # images encoded at once; it matters for speed only
PIECE = 64 * BATCH  # images whose features are kept in one file while a bank is built; whole batches, for equal bits

LIBRARIES = ("adanpc", "timm", "torch", "torchvision")  # the code of their modules is not read: layers describe them

logger = logging.getLogger("adanpc")


def features(
    model: SourceModel, domain: Domain, *, cache: Path | None = None, workers: int | None = None, size: int = BATCH
) -> Tensor:
    """Returns the features (n, D) of all images of a domain in order, computed in evaluation mode, on the CPU.

    Args:
        model: the model whose encoder is used; it is put back into its own mode afterward.
        domain: with the transform that the model expects.
        cache: a folder for a file of the features, named by the digests of the encoder and of the domain. If the file
            exists, it is read instead of computing them, else it is written. Models that differ only in the head share
            the file. A file that is damaged, or that holds anything else, is replaced, with a warning in the log. If
            several processes need the same file, one computes it and the others wait.
        workers: the number of processes that read images; see ``data.loading.ahead``.
        size: the number of images encoded at once.
    """
    if cache is None:
        return _encode(model, domain, workers, size)
    origin = {**_origin(model, domain), "rows": len(domain)}
    path = cache / f"{origin['model']}-{origin['domain']}.safetensors"
    with held(path.with_suffix(".lock"), wait=True):  # several processes may want the same features at once
        return _kept_or_made(model, domain, path, origin, workers, size)


def features_in_pieces(
    model: SourceModel, domain: Domain, folder: Path | None, *, workers: int | None = None
) -> Iterator[Tensor]:
    """What ``features`` gives, to the bit, a few thousand rows at a time.

    Args:
        model, domain, workers: see ``features``.
        folder: where each piece is kept as soon as it is made, and read from if it was made before: whoever is killed
            and starts again goes on where it was. A piece that is damaged, or of anything else, is made again.
    """
    origin: dict[str, Any] = {}
    if folder is not None:
        origin = _origin(model, domain)
    starts = range(0, len(domain), PIECE)
    for start in track(starts, f"features of {domain.name}", len(starts)):
        piece = domain.subset(range(start, min(start + PIECE, len(domain))))
        if folder is None:
            yield _encode(model, piece, workers, BATCH)
        else:
            about = {**origin, "start": start, "rows": len(piece)}
            name = f"{origin['model']}-{origin['domain']}-{start}.safetensors"
            yield _kept_or_made(model, piece, folder / name, about, workers)


def _kept_or_made(
    model: SourceModel, domain: Domain, path: Path, origin: Mapping[str, Any], workers: int | None, size: int = BATCH
) -> Tensor:
    """The features of a domain from a file, which is made if it is not there or holds anything else."""
    if path.exists():
        try:
            return _read(path, origin)
        except SealError as error:
            logger.warning("%s; it is computed again", error)
    encoded = _encode(model, domain, workers, size)
    write_sealed(path, {"features": encoded}, {**origin, "dim": encoded.shape[1]})
    return encoded


def _origin(model: SourceModel, domain: Domain) -> dict[str, Any]:
    """What says of which model and which images features are."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": identity(nn.ModuleList([model.encoder, model.norm])),  # the head does not affect features
        "domain": domain.digest(),
    }


def identity(model: nn.Module) -> str:
    """A hash of all that decides what a model computes, as far as this can be known: weights, layers, and own code."""
    parts = [fingerprint(model), describe(model)]
    for file in sorted(_own_files(model)):
        parts.append(hashlib.sha256(file.read_bytes()).hexdigest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _own_files(model: nn.Module) -> set[Path]:
    """The files of the classes of a model's modules, without those of the libraries that it is made of."""
    files = set()
    for kind in {type(module) for module in model.modules()}:
        if kind.__module__.partition(".")[0] in LIBRARIES:
            continue
        try:
            files.add(Path(inspect.getfile(kind)))
        except (TypeError, OSError):
            continue  # typed at a prompt, so there is no file
    return {file for file in files if file.is_file()}


def _read(path: Path, origin: Mapping[str, Any]) -> Tensor:
    """Returns the features in a file; raises SealError if they are damaged or of another origin."""
    tensors, document = read_sealed(path)
    encoded = tensors.get("features")
    if encoded is None or encoded.ndim != 2 or encoded.dtype != torch.float32:
        raise SealError(f"{path} does not hold features")
    if document != {**origin, "dim": encoded.shape[1]} or len(encoded) != origin["rows"]:
        raise SealError(f"{path} holds features of another model or domain")
    return encoded


def _encode(model: SourceModel, domain: Domain, workers: int | None, size: int) -> Tensor:
    """Computes the features (n, D) of a domain."""
    was_training = model.training
    model.eval()
    parts: list[Tensor] = []
    try:
        with torch.no_grad():
            count = math.ceil(len(domain) / size)
            for images, _ in track(chunks(domain, size, workers), f"features of {domain.name}", count):
                parts.append(model.features(images.to(model.device)).float().cpu())
    finally:
        model.train(was_training)
    if not parts:
        return torch.zeros(0, model.dim)
    return torch.cat(parts)
