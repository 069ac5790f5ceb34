"""ETA that returns to the source model: after a fixed time (RDumb), or in part when answers collapse (ASR)."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from math import log
from typing import Any

import torch
from torch import Tensor

from adanpc import require
from adanpc.lab.adapt.adapter import Source
from adanpc.lab.adapt.entropy import entropy
from adanpc.lab.adapt.filtered import ETA


class RDumb(ETA):
    """ETA that forgets the stream after every ``every`` samples.

    Setting ``adapter.reset_every = n`` makes any method do this.

    Paper:
        Press et al., RDumb: A Simple Approach That Questions Our Progress in Continual Test-Time Adaptation, NeurIPS
        2023.

    Differs from the published code:
        Samples are counted instead of batches of 64. Otherwise in the same ways as ETA.

    Args:
        every: the number of samples between two resets; by default 1,000 batches of 64.
        lr, optimizer: see ``ETA``.
    """

    def __init__(self, source: Source, *, every: int = 64_000, lr: float | None = None, optimizer: str = "sgd") -> None:
        super().__init__(source, lr=lr, optimizer=optimizer)
        self.reset_every = require.whole("every", every, least=1)


class ASR(ETA):
    """ETA whose last layers return to the source when the answers to a batch are too much alike.

    The entropy of the softmax of a batch's mean logits is compared with a running average of this entropy. If it is
    below the average, the model resets in part: of the trained weights only the first stay, a share of
    ``max(kept - slope * (average - entropy), 0)``, and the others become those of the source again. The optimizer,
    ETA's average answer and the average entropy start again, too. Otherwise the average moves toward the entropy, the
    more slowly the more answers differ from those of the source model. A penalty pulls the weights toward where they
    were before earlier resets. It is stronger for weights that matter more, judged by the squared gradients of the
    loss, and the more answers differ from those of the source model.

    Paper:
        Lim, Hwang and Lee, When and Where to Reset Matters for Long-Term Test-Time Adaptation, ICLR 2026 (ASR).

    Differs from the published code:
        A batch without a selected answer changes neither weights nor penalty; in the published code it leads to NaN.
        Otherwise in the same ways as ETA.

    Args:
        momentum: the largest share of the way that the average moves; m0 in the published settings.
        start: the average starts at the entropy of ``start * C`` equally likely classes; a0 there.
        kept: the share of weights that stays if the entropy is just below the average; r0 there.
        slope: how fast that share falls for each nat that the entropy is below the average; r1 there.
        penalty: the weight of the penalty if all answers differ from those of the source model; p0 there.
        lr, optimizer: see ``ETA``.
    """

    def __init__(
        self,
        source: Source,
        *,
        momentum: float = 0.15,
        start: float = 0.5,
        kept: float = 0.5,
        slope: float = 20.0,
        penalty: float = 5.0,
        lr: float | None = None,
        optimizer: str = "sgd",
    ) -> None:
        super().__init__(source, lr=lr, optimizer=optimizer)
        self.momentum = momentum
        self.kept = kept
        self.slope = slope
        self.penalty = penalty
        self.first_average = log(start * self.model.classes)
        self.average = self.first_average  # entropy, in nats
        self.frozen = deepcopy(self.model).requires_grad_(False)
        self.flipped = 0.0  # the share of answers to the last batch that differ from the source model's
        self.steps_taken = 0  # since the last reset
        # For each trained parameter, sums over the steps since the last reset: of squared gradients, and of weights.
        self.squares = [torch.zeros_like(parameter) for parameter in self.trained]
        self.weights = [torch.zeros_like(parameter) for parameter in self.trained]
        # Running averages of the same over earlier resets; empty until the first.
        self.importance: list[Tensor] = []
        self.usual: list[Tensor] = []

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) as they were before the step."""
        with torch.enable_grad():
            logits = self.classify(batch)
            self.learn(batch, logits)
        logits = logits.detach()
        self._reset_if_collapsing(batch, logits)
        return logits.softmax(1)

    def objective(self, loss: Tensor) -> Tensor:
        """Returns the loss with the penalty, and records how much each weight matters for the loss."""
        gradients = torch.autograd.grad(
            loss, self.trained, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        self.steps_taken += 1
        for place, gradient in enumerate(gradients):
            self.squares[place] += gradient.square()
            self.weights[place] += self.trained[place].detach()
        terms = []
        # Not strict: before the first reset, ``importance`` and ``usual`` are empty.
        for importance, now, usual in zip(self.importance, self.trained, self.usual, strict=False):
            terms.append((importance * (now - usual).square()).sum())
        if not terms:
            return loss
        return loss + self.penalty * self.flipped**2 * torch.stack(terms).sum()

    @torch.no_grad()
    def _reset_if_collapsing(self, batch: Tensor, logits: Tensor) -> None:
        """Resets in part if the answers to a batch are too much alike; otherwise moves the average entropy."""
        batch_entropy = float(entropy(logits.mean(0, keepdim=True)))
        differs = self.frozen(batch).argmax(1) != logits.argmax(1)
        self.flipped = float(differs.double().mean())
        if batch_entropy < self.average:
            self._remember_weights()
            share = max(self.kept - self.slope * (self.average - batch_entropy), 0.0)
            self._reset_in_part(share)
            self.average = self.first_average
        else:
            stays = 1 - self.momentum + self.momentum * self.flipped
            self.average = stays * self.average + (1 - stays) * batch_entropy

    def _remember_weights(self) -> None:
        """Adds what was recorded since the last reset to the averages over resets, and starts recording again."""
        if self.steps_taken == 0:  # no answer has been selected since the last reset
            return
        squares = [total / self.steps_taken for total in self.squares]
        weights = [total / self.steps_taken for total in self.weights]
        if self.importance:
            squares = [0.9 * old + 0.1 * new for old, new in zip(self.importance, squares, strict=True)]
            weights = [0.9 * old + 0.1 * new for old, new in zip(self.usual, weights, strict=True)]
        self.importance = squares
        self.usual = weights
        self.squares = [torch.zeros_like(parameter) for parameter in self.trained]
        self.weights = [torch.zeros_like(parameter) for parameter in self.trained]
        self.steps_taken = 0

    def _reset_in_part(self, share: float) -> None:
        """Keeps the first of the trained parameters, a share of them; resets the others and the optimizer."""
        before = [parameter.detach().clone() for parameter in self.trained]
        self.recover()
        for place, parameter in enumerate(self.trained):
            if place < share * len(self.trained):
                parameter.copy_(before[place])
        self.selection.average.zero_()

    def extra(self) -> dict[str, Any]:
        """Returns the average entropy and what the penalty is computed from."""
        return {
            "average": self.average,
            "flipped": self.flipped,
            "steps_taken": self.steps_taken,
            "squares": _copied(self.squares),
            "weights": _copied(self.weights),
            "importance": _copied(self.importance),
            "usual": _copied(self.usual),
        }

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts back what ``extra`` returned."""
        self.average = extra["average"]
        self.flipped = extra["flipped"]
        self.steps_taken = extra["steps_taken"]
        self.squares = _copied(extra["squares"])
        self.weights = _copied(extra["weights"])
        self.importance = _copied(extra["importance"])
        self.usual = _copied(extra["usual"])


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    """Returns copies of tensors."""
    return [tensor.clone() for tensor in tensors]
