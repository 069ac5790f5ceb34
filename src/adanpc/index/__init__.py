"""Where rows are stored and searched: unit vectors, exact nearest neighbors. Knows nothing of labels."""

import torch

from adanpc.index.exact import ExactIndex
from adanpc.index.faiss import ApproximateIndex
from adanpc.index.grid import STORAGE, check_features, unit
from adanpc.index.progressive import ProgressiveIndex
from adanpc.index.protocol import Found, Index, Wanted

__all__ = [
    "STORAGE",
    "ApproximateIndex",
    "ExactIndex",
    "Found",
    "Index",
    "ProgressiveIndex",
    "Wanted",
    "check_features",
    "index_for",
    "unit",
]


def index_for(dim: int, storage: str, device: torch.device) -> Index:
    """The index for rows of this storage: what a bank takes unless it is given another."""
    if storage == "progressive" and device.type == "cpu":
        return ProgressiveIndex(dim, storage, device)
    return ExactIndex(dim, storage, device)  # on other devices it finds the same
