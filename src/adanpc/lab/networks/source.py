"""A source model: an encoder that makes features, and a head that makes logits of them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.preprocessing import Preprocessing
from adanpc.models.wrap import INPUT_OF, extract, find_head


class SourceModel(nn.Module):
    """Encoder and linear head, with an optional BatchNorm between them; ``forward`` gives logits (B, C).

    Args:
        encoder: images to features (B, D).
        dim: D.
        classes: C.
        head: linear, D to C; by default a fresh one.
        norm: puts a BatchNorm1d between encoder and head (the paper's BN trick); the features are its output.
        dropout: of the features, in training, before the norm.
        frozen_batchnorm: the encoder's BatchNorm layers keep their statistics in training, as in DomainBed; their
            scales and shifts are still trained.
        preprocessing: what turns images into inputs.
    """

    def __init__(
        self,
        encoder: nn.Module,
        dim: int,
        classes: int,
        *,
        head: nn.Linear | None = None,
        norm: bool = False,
        dropout: float = 0.0,
        frozen_batchnorm: bool = False,
        preprocessing: Preprocessing | None = None,
    ) -> None:
        super().__init__()
        if dim < 1 or classes < 1:
            raise AdaNPCError(f"a source model needs at least 1 feature and 1 class, got {dim} and {classes}")
        self.encoder = encoder
        self.dim = dim
        self.classes = classes
        self.dropout = nn.Dropout(dropout)
        self.norm: nn.Module = nn.BatchNorm1d(dim) if norm else nn.Identity()
        self.head: nn.Module = nn.Linear(dim, classes) if head is None else head
        self.frozen_batchnorm = frozen_batchnorm
        self.preprocessing = preprocessing or Preprocessing()
        self._freeze()

    @classmethod
    def of(cls, model: nn.Module, inputs: Any, *, preprocessing: Preprocessing | None = None) -> SourceModel:
        """Any classifier that ends in a linear layer, split there; a copy: the model given is not changed.

        Args:
            model: a trained classifier. Its modules stay in training or evaluation as they are.
            inputs: a batch to run, so that its last linear layer is found.
            preprocessing: what made the inputs.
        """
        layer, classes = find_head(model, inputs)
        features, logits = extract(model, layer, inputs)
        if not isinstance(logits, Tensor) or logits.ndim != 2 or layer == INPUT_OF:
            form = f"a {type(model).__name__} that makes other outputs"
            if isinstance(model, nn.Linear):
                form = "a Linear alone"
            raise AdaNPCError(f"the model must be an encoder and a linear head with logits (B, C), got {form}")
        head_name = layer.removeprefix(INPUT_OF)
        encoder, head = _without_head(model, head_name)
        split = cls(encoder, head.in_features, classes, head=head, preprocessing=preprocessing)
        split.training = model.training
        # What the halves make must be what the model made, which it is not if other parts used the head's layer, too.
        split_features, split_logits = extract(split, "encoder", inputs)
        same_features = split_features.shape == features.shape and torch.allclose(split_features, features)
        if not same_features or not torch.allclose(split_logits, logits):
            raise AdaNPCError(f"the linear layer {head_name!r} is used more than once in the model")
        return split

    def features(self, images: Tensor) -> Tensor:
        """Features (B, D) of inputs (B, C, H, W): what is stored in a bank and what the head sees."""
        return cast(Tensor, self.norm(self.dropout(self.encoder(images))))

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of inputs."""
        return cast(Tensor, self.head(self.features(images)))

    def train(self, mode: bool = True) -> SourceModel:
        """Switches to training mode as any module does, but frozen BatchNorm layers stay in evaluation mode."""
        super().train(mode)
        self._freeze()
        return self

    def _freeze(self) -> None:
        if self.frozen_batchnorm:
            for module in self.encoder.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()

    @property
    def device(self) -> torch.device:
        """Where the head's weights are."""
        return next(self.head.parameters()).device


def _without_head(model: nn.Module, name: str) -> tuple[nn.Module, nn.Linear]:
    """A copy of the model that does nothing at the linear layer of this name, and its copy of that layer."""
    encoder = deepcopy(model)
    head = cast(nn.Linear, encoder.get_submodule(name))
    for alias, module in list(encoder.named_modules(remove_duplicate=False)):
        if module is head:  # one layer may be known by several names
            parent, _, last = alias.rpartition(".")
            setattr(encoder.get_submodule(parent), last, nn.Identity())
    return encoder, head
