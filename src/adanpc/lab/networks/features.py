"""Features of whole domains: computed once, kept on disk if asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from adanpc.files import replace
from adanpc.lab.data.domain import Domain
from adanpc.lab.data.loading import chunks
from adanpc.lab.networks.source import SourceModel
from adanpc.models.recipe import fingerprint
from adanpc.progress import track

SIZE = 64  # images encoded at once; a matter of speed


def features(
    model: SourceModel, domain: Domain, *, cache: Path | None = None, workers: int | None = None, size: int = SIZE
) -> Tensor:
    """Features (n, D) of all images of a domain, in its order, in evaluation mode, on the CPU.

    Args:
        model: the encoder; its mode is put back.
        domain: with the transform that the model expects.
        cache: a folder. A file there, named by the digests of what makes features and of the domain, is read instead
            of computing, or written after it. The head makes no features: models that differ by it share the file.
        workers: processes that read images, see ``data.loading.ahead``.
        size: images encoded at once.
    """
    path = None if cache is None else cache / f"{_maker(model)}-{domain.digest()}.npy"
    if path is not None and path.exists():
        return torch.from_numpy(np.load(path, allow_pickle=False))
    made = _encoded(model, domain, workers, size)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, lambda new: _write(new, made))
    return made


def _maker(model: SourceModel) -> str:
    return fingerprint(nn.ModuleList([model.encoder, model.norm]))


def _encoded(model: SourceModel, domain: Domain, workers: int | None, size: int) -> Tensor:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            batches = track(chunks(domain, size, workers), f"features of {domain.name}", -(-len(domain) // size))
            parts = [model.features(images.to(model.device)).float().cpu() for images, _ in batches]
    finally:
        model.train(training)
    return torch.cat(parts) if parts else torch.zeros(0, model.dim)


def _write(path: Path, values: Tensor) -> None:
    with path.open("wb") as file:
        np.save(file, values.numpy(), allow_pickle=False)
