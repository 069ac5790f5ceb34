"""Predictions as bytes and back, and the part of one that belongs to some of its queries."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from adanpc.core import Neighbors, Prediction

NEIGHBORS = "neighbors."  # before the names of their tensors


def encode_answer(answer: Prediction) -> bytes:
    """A settled prediction as bytes; ``decode_answer`` gives it back."""
    tensors = _tensors(answer)
    for name, tensor in _tensors(answer.neighbors).items():
        tensors[NEIGHBORS + name] = tensor
    data: bytes = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    return data


def decode_answer(data: bytes) -> Prediction:
    """What ``encode_answer`` wrote."""
    own: dict[str, Any] = {}
    of_neighbors: dict[str, Any] = {}
    for name, tensor in load(data).items():
        if name.startswith(NEIGHBORS):
            of_neighbors[name.removeprefix(NEIGHBORS)] = tensor
        else:
            own[name] = tensor
    return Prediction(**own, neighbors=Neighbors(**of_neighbors))


def part_of(answer: Prediction, queries: slice) -> Prediction:
    """The answer to some of the queries, in tensors of its own."""
    own: dict[str, Any] = {name: tensor[queries].clone() for name, tensor in _tensors(answer).items()}
    of_neighbors = {name: tensor[queries].clone() for name, tensor in _tensors(answer.neighbors).items()}
    return replace(answer, **own, neighbors=Neighbors(**of_neighbors))


def _tensors(value: Prediction | Neighbors) -> dict[str, Tensor]:
    """The fields that are tensors, by name."""
    found = {}
    for field in fields(value):
        content = getattr(value, field.name)
        if isinstance(content, Tensor):
            found[field.name] = content
    return found
