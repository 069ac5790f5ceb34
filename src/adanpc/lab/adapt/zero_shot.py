"""Zero-shot answers: one direction for each class, as in vision-language models. TDA and others build on them."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn.functional import normalize

from adanpc import require
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source

SCALE = 100.0  # what cosines are multiplied by; CLIP limits its learned scale to this, and usually reaches it
PROTOTYPES = ("head", "means")


class ZeroShot(Adapter):
    """Answers with the softmax of 100 times the cosines between a feature and one direction for each class.

    It learns nothing; the methods of ``caches`` and ``gaussians`` start from these answers. The directions are the rows
    of the head. They may be trained, or they may be text embeddings of the class names, for an encoder whose linear
    head is made of these.

    Paper:
        Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021.

    Args:
        prototypes: ``head`` for the rows of the head, ``means`` for the mean direction of the source features of each
            class.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"
    directions: Tensor  # (C, D), unit rows

    def __init__(self, source: Source, *, prototypes: str = "head") -> None:
        super().__init__(source)
        self.register_buffer("directions", class_directions(source, prototypes).to(self.model.device))

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) of features (B, D)."""
        _, logits = self.rows_and_logits(batch)
        return logits.softmax(1)

    def rows_and_logits(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns features (B, D) scaled to unit length, and their logits (B, C)."""
        rows = normalize(features, dim=1)
        return rows, SCALE * rows @ self.directions.T


def class_directions(source: Source, prototypes: str) -> Tensor:
    """Returns one unit row for each class (C, D): the head's row, or the mean direction of its source features."""
    require.one_of("prototypes", prototypes, PROTOTYPES)
    if prototypes == "means":
        return mean_directions(source)
    head = source.model.head
    if not isinstance(head, nn.Linear):
        raise AdaNPCError(
            "the head is not a single linear layer, so its rows cannot be prototypes: use prototypes='means'"
        )
    return normalize(head.weight.detach(), dim=1)


def mean_directions(source: Source) -> Tensor:
    """Returns the directions (C, D) of the sums of the unit features of each class."""
    sums = source.features.new_zeros(source.model.classes, source.model.dim)
    sums.index_add_(0, source.labels, normalize(source.features, dim=1))
    missing = source.model.classes - len(source.labels.unique())
    if missing:
        raise AdaNPCError(f"{missing} classes have no source features to take the mean of: use prototypes='head'")
    return normalize(sums, dim=1)
