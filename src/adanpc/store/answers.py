"""Encoding predictions as bytes, decoding them, and cutting out the part that belongs to some of the queries."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from adanpc.core import Neighbors, Prediction

NEIGHBORS = "neighbors."  # prefix of the names of their tensors


def encode_answer(answer: Prediction) -> bytes:
    """Returns a settled prediction as bytes, for ``decode_answer``."""
    tensors = _tensors(answer)
    for name, tensor in _tensors(answer.neighbors).items():
        tensors[NEIGHBORS + name] = tensor
    data: bytes = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    return data


def decode_answer(data: bytes) -> Prediction:
    """Returns the prediction that ``encode_answer`` encoded."""
    own: dict[str, Any] = {}
    of_neighbors: dict[str, Any] = {}
    for name, tensor in load(data).items():
        if name.startswith(NEIGHBORS):
            of_neighbors[name.removeprefix(NEIGHBORS)] = tensor
        else:
            own[name] = tensor
    return Prediction(**own, neighbors=Neighbors(**of_neighbors))


def part_of(answer: Prediction, queries: slice) -> Prediction:
    """Returns the answer to some of the queries, in tensors of its own."""
    own: dict[str, Any] = {name: tensor[queries].clone() for name, tensor in _tensors(answer).items()}
    of_neighbors = {name: tensor[queries].clone() for name, tensor in _tensors(answer.neighbors).items()}
    return replace(answer, **own, neighbors=Neighbors(**of_neighbors))


def _tensors(value: Prediction | Neighbors) -> dict[str, Tensor]:
    """Returns the fields that are tensors, by name."""
    found = {}
    for field in fields(value):
        content = getattr(value, field.name)
        if isinstance(content, Tensor):
            found[field.name] = content
    return found
