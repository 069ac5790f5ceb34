"""A source model: an encoder from inputs to features, and a head from features to logits."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.preprocessing import Preprocessing
from adanpc.models.extract import extract, find_head
from adanpc.models.layers import INPUT_OF


class SourceModel(nn.Module):
    """An encoder and a linear head, with an optional BatchNorm between them; ``forward`` returns logits (B, C).

    Args:
        encoder: maps images to features (B, D).
        dim: the dimension D of the features.
        classes: the number C of classes.
        head: a linear layer from D to C; by default a new one.
        norm: whether to put a BatchNorm1d between encoder and head (the paper's BN trick), whose outputs are then the
            features.
        dropout: the dropout of features in training, before the norm.
        frozen_batchnorm: whether the encoder's BatchNorm layers keep their statistics in training, as in DomainBed;
            their scales and shifts are still trained.
        preprocessing: turns images into inputs.
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
        """Returns a copy of any classifier that ends in a linear layer, split there into encoder and head.

        Args:
            model: a trained classifier, which is not changed. Modules of the copy are in the mode of the originals.
            inputs: a batch to run through the model, in order to find its last linear layer.
            preprocessing: turns images into inputs.
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
        # The halves must give what the whole model gives. They do not if other parts of it use the head's layer, too.
        split_features, split_logits = extract(split, "encoder", inputs)
        same_features = split_features.shape == features.shape and torch.allclose(split_features, features)
        if not same_features or not torch.allclose(split_logits, logits):
            raise AdaNPCError(f"the linear layer {head_name!r} is used more than once in the model")
        return split

    def features(self, images: Tensor) -> Tensor:
        """Returns the features (B, D) of inputs (B, C, H, W), which the head takes and a bank stores."""
        return cast(Tensor, self.norm(self.dropout(self.encoder(images))))

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits (B, classes) of inputs."""
        return cast(Tensor, self.head(self.features(images)))

    def train(self, mode: bool = True) -> SourceModel:
        """Switches to training mode like any module, but frozen BatchNorm layers stay in evaluation mode."""
        super().train(mode)
        self._freeze()
        return self

    def _freeze(self) -> None:
        """Puts frozen BatchNorm layers into evaluation mode."""
        if self.frozen_batchnorm:
            for module in self.encoder.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()

    @property
    def device(self) -> torch.device:
        """The device of the head's weights."""
        return next(self.head.parameters()).device


def _without_head(model: nn.Module, name: str) -> tuple[nn.Module, nn.Linear]:
    """Returns a copy of the model with an identity in place of this linear layer, and a copy of the layer."""
    encoder = deepcopy(model)
    head = cast(nn.Linear, encoder.get_submodule(name))
    for alias, module in list(encoder.named_modules(remove_duplicate=False)):
        if module is head:  # a layer may be registered under several names
            parent, _, last = alias.rpartition(".")
            setattr(encoder.get_submodule(parent), last, nn.Identity())
    return encoder, head
