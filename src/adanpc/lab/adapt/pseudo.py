"""The model descends on labels that it gives itself: pseudo-labels and SHOT."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source, descend


class _Learner(Adapter):
    """Takes steps of Adam on a loss of each batch's logits; answers with the logits that the last step was made of.

    Args:
        alpha: the learning rate, in units of the source's.
        steps: for each batch.
    """

    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"alpha": (0.1, 1.0, 10.0), "steps": (1, 3)}

    def __init__(self, source: Source, *, alpha: float = 1.0, steps: int = 1) -> None:
        super().__init__(source)
        if steps < 1:
            raise AdaNPCError(f"steps must be at least 1, got {steps}")
        self.steps = steps
        for module in self.learning():
            module.requires_grad_(True)
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not parameters:
            raise AdaNPCError(f"{type(self).__name__} trains the encoder, and this one has no weights: take PLClf")
        self.optimizers["adam"] = Adam(parameters, lr=source.lr * alpha)

    @abstractmethod
    def learning(self) -> tuple[nn.Module, ...]:
        """The parts of the model whose weights are trained."""

    @abstractmethod
    def loss(self, logits: Tensor) -> Tensor | None:
        """What is descended on logits (B, C); None: there is nothing to learn from them."""

    def moving(self) -> set[str]:
        """The trained weights."""
        return {name for name, value in self.named_parameters(remove_duplicate=False) if value.requires_grad}

    @torch.enable_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Probabilities (B, C), after all steps but the last."""
        classify = self.model if self.sees == "images" else self.model.head
        for _ in range(self.steps):
            logits: Tensor = classify(batch)
            loss = self.loss(logits)
            if loss is None:
                break
            descend(loss, self.optimizers["adam"])
        return logits.detach().softmax(1)


class PLClf(_Learner):
    """Pseudo-labels, head only: cross-entropy with the model's own class, of rows of which it is sure.

    A batch with no such row changes nothing.

    Args:
        alpha: the learning rate, in units of the source's.
        steps: for each batch.
        threshold: a row is learned from if its highest probability is above this.

    Paper: Lee, Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method for Deep Neural Networks, 2013;
    online as in Iwasawa and Matsuo, Test-Time Classifier Adjustment Module (T3A), 2021.

    Differs from the published code: that of T3A takes the mean over no rows, which is NaN, when it is sure of none; and
    it keeps the weight decay of source training, here there is none.
    """

    in_paper: ClassVar[str] = "PLClf"
    sees: ClassVar[Literal["images", "features"]] = "features"

    def __init__(self, source: Source, *, alpha: float = 1.0, steps: int = 1, threshold: float = 0.9) -> None:
        super().__init__(source, alpha=alpha, steps=steps)
        self.threshold = threshold

    def learning(self) -> tuple[nn.Module, ...]:
        """The head."""
        return (self.model.head,)

    def loss(self, logits: Tensor) -> Tensor | None:
        """The cross-entropy of sure rows."""
        return pseudo_label_loss(logits, self.threshold)


class PLFull(_Learner):
    """Pseudo-labels, all weights: as ``PLClf``, but encoder, norm and head are trained.

    BatchNorm layers keep the statistics of the source.

    Args:
        alpha: the learning rate, in units of the source's.
        steps: for each batch.
        threshold: a row is learned from if its highest probability is above this.

    Paper: see ``PLClf``; it differs from the published code in the same ways.
    """

    in_paper: ClassVar[str] = "PLFull"

    def __init__(self, source: Source, *, alpha: float = 1.0, steps: int = 1, threshold: float = 0.9) -> None:
        super().__init__(source, alpha=alpha, steps=steps)
        self.threshold = threshold

    def learning(self) -> tuple[nn.Module, ...]:
        """The whole model."""
        return (self.model,)

    def loss(self, logits: Tensor) -> Tensor | None:
        """The cross-entropy of sure rows."""
        return pseudo_label_loss(logits, self.threshold)


class SHOT(_Learner):
    """Information maximization plus pseudo-labels: the features move until the fixed head is sure of them.

    Args:
        alpha: the learning rate, in units of the source's.
        steps: for each batch.
        threshold: a row has a pseudo-label if its highest probability is above this; none has: that part is left out.
        weight: of the pseudo-labels.

    Paper: Liang, Hu and Feng, Do We Really Need to Access the Source Data?, 2020; online as in T3A (see ``PLClf``).

    Differs from the published code: the original passes over the whole target set and labels it by its distance to
    class centroids; the online form of T3A, which is this one, labels by the head. Like ``PLClf``, it is guarded
    against batches of which it is sure of no row, and has no weight decay.
    """

    in_paper: ClassVar[str] = "SHOT"

    def __init__(
        self, source: Source, *, alpha: float = 1.0, steps: int = 1, threshold: float = 0.9, weight: float = 0.1
    ) -> None:
        super().__init__(source, alpha=alpha, steps=steps)
        self.threshold, self.weight = threshold, weight

    def learning(self) -> tuple[nn.Module, ...]:
        """All that makes features."""
        return self.model.encoder, self.model.norm

    def loss(self, logits: Tensor) -> Tensor:
        """Information maximization, plus the weighted cross-entropy of sure rows, if there are any."""
        loss, labels = information_maximization(logits), pseudo_label_loss(logits, self.threshold)
        return loss if labels is None else loss + self.weight * labels


class SHOTIM(_Learner):
    """Information maximization alone: each row's class should be certain, the batch's classes varied.

    Args:
        alpha: the learning rate, in units of the source's.
        steps: for each batch.

    Paper: see ``SHOT``.
    """

    in_paper: ClassVar[str] = "SHOTIM"

    def learning(self) -> tuple[nn.Module, ...]:
        """All that makes features."""
        return self.model.encoder, self.model.norm

    def loss(self, logits: Tensor) -> Tensor:
        """Information maximization."""
        return information_maximization(logits)


def pseudo_label_loss(logits: Tensor, threshold: float) -> Tensor | None:
    """The mean cross-entropy () of logits (B, C) with their own classes, over rows surer than the threshold, if any."""
    confidence, labels = logits.detach().softmax(1).max(1)
    sure = confidence > threshold
    return cross_entropy(logits[sure], labels[sure]) if sure.any() else None


def information_maximization(logits: Tensor) -> Tensor:
    """The mean entropy of rows (B, C), minus the entropy of their mean: the lower, the surer and the more varied."""
    probs = logits.softmax(1)
    certainty = (probs * logits.log_softmax(1)).sum(1).mean()
    mean = probs.mean(0)
    return (mean * (mean + 1e-5).log()).sum() - certainty
