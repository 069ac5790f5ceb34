"""Methods that train the model on its own answers: pseudo-labels and SHOT."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from adanpc import require
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source, descend


class _SelfTraining(Adapter, ABC):
    """Makes steps of Adam on a loss of each batch's logits, and answers with the logits from before the last step.

    Args:
        alpha: the learning rate, as a multiple of that of source training.
        steps: the number of steps on each batch.
    """

    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"alpha": (0.1, 1.0, 10.0), "steps": (1, 3)}

    def __init__(self, source: Source, *, alpha: float = 1.0, steps: int = 1) -> None:
        super().__init__(source)
        self.steps = require.whole("steps", steps, least=1)
        for module in self.learning():
            module.requires_grad_(True)
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not parameters:
            raise AdaNPCError(f"{type(self).__name__} trains the encoder, and this one has no weights: use PLClf")
        self.optimizers["adam"] = Adam(parameters, lr=source.lr * alpha)

    @abstractmethod
    def learning(self) -> tuple[nn.Module, ...]:
        """Returns the parts of the model whose weights are trained."""

    @abstractmethod
    def loss(self, logits: Tensor) -> Tensor | None:
        """Returns the loss () to minimize, given logits (B, C); None if there is nothing to learn from them."""

    def moving(self) -> set[str]:
        """Returns the names of the trained weights."""
        # With duplicates: a weight that is used in several places has several names in ``state_dict``.
        return {name for name, value in self.named_parameters(remove_duplicate=False) if value.requires_grad}

    @torch.enable_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) as they were before the last step."""
        classify = self.model if self.sees == "images" else self.model.head
        for _ in range(self.steps):
            logits: Tensor = classify(batch)
            loss = self.loss(logits)
            if loss is None:
                break
            descend(loss, self.optimizers["adam"])
        return logits.detach().softmax(1)


class PLClf(_SelfTraining):
    """Trains the head on its own confident answers.

    A batch without a confident answer changes nothing.

    Paper:
        Lee, Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method for Deep Neural Networks, ICML
        Workshop 2013; online as in Iwasawa and Matsuo, Test-Time Classifier Adjustment Module for Model-Agnostic Domain
        Generalization (T3A), NeurIPS 2021.

    Differs from the published code:
        If no answer is confident, the code of T3A averages over no rows, which gives NaN. It also keeps the weight
        decay of source training; here there is none.

    Args:
        alpha: the learning rate, as a multiple of that of source training.
        steps: the number of steps on each batch.
        threshold: an answer is confident if its highest probability is above this.
    """

    in_paper: ClassVar[str] = "PLClf"
    sees: ClassVar[Literal["images", "features"]] = "features"

    def __init__(self, source: Source, *, alpha: float = 1.0, steps: int = 1, threshold: float = 0.9) -> None:
        super().__init__(source, alpha=alpha, steps=steps)
        self.threshold = threshold

    def learning(self) -> tuple[nn.Module, ...]:
        """Returns the head."""
        return (self.model.head,)

    def loss(self, logits: Tensor) -> Tensor | None:
        """Returns the cross-entropy of confident rows."""
        return pseudo_label_loss(logits, self.threshold)


class PLFull(_SelfTraining):
    """Trains all weights on the model's own confident answers.

    BatchNorm layers keep the statistics of the source. A batch without a confident answer changes nothing.

    Paper:
        Lee 2013, and Iwasawa and Matsuo 2021: see ``PLClf``.

    Differs from the published code:
        In the same ways as ``PLClf``.

    Args:
        alpha: the learning rate, as a multiple of that of source training.
        steps: the number of steps on each batch.
        threshold: an answer is confident if its highest probability is above this.
    """

    in_paper: ClassVar[str] = "PLFull"

    def __init__(self, source: Source, *, alpha: float = 1.0, steps: int = 1, threshold: float = 0.9) -> None:
        super().__init__(source, alpha=alpha, steps=steps)
        self.threshold = threshold

    def learning(self) -> tuple[nn.Module, ...]:
        """Returns the whole model."""
        return (self.model,)

    def loss(self, logits: Tensor) -> Tensor | None:
        """Returns the cross-entropy of confident rows."""
        return pseudo_label_loss(logits, self.threshold)


class SHOT(_SelfTraining):
    """Trains the encoder, by information maximization and pseudo-labels, to make the fixed head more confident.

    Paper:
        Liang, Hu and Feng, Do We Really Need to Access the Source Data? Source Hypothesis Transfer for Unsupervised
        Domain Adaptation, ICML 2020; online as in T3A (see ``PLClf``).

    Differs from the published code:
        The original passes over the whole target set and labels it by the distance to class centroids; the online form
        of T3A, which is this one, takes the head's answers as labels. As in ``PLClf``, batches without a confident
        answer are allowed, and there is no weight decay.

    Args:
        alpha: the learning rate, as a multiple of that of source training.
        steps: the number of steps on each batch.
        threshold: a row gets a pseudo-label if its highest probability is above this; if no row does, that part of the
            loss is left out.
        weight: the weight of the pseudo-labels in the loss.
    """

    in_paper: ClassVar[str] = "SHOT"

    def __init__(
        self, source: Source, *, alpha: float = 1.0, steps: int = 1, threshold: float = 0.9, weight: float = 0.1
    ) -> None:
        super().__init__(source, alpha=alpha, steps=steps)
        self.threshold = threshold
        self.weight = weight

    def learning(self) -> tuple[nn.Module, ...]:
        """Returns the parts that compute features."""
        return (self.model.encoder, self.model.norm)

    def loss(self, logits: Tensor) -> Tensor:
        """Returns the loss of information maximization, plus the weighted cross-entropy of confident rows, if any."""
        loss = information_maximization(logits)
        pseudo_labels = pseudo_label_loss(logits, self.threshold)
        if pseudo_labels is not None:
            loss = loss + self.weight * pseudo_labels
        return loss


class SHOTIM(_SelfTraining):
    """Trains the encoder by information maximization alone: each answer should be certain, and answers should vary.

    Paper:
        Liang, Hu and Feng 2020: see ``SHOT``.

    Args:
        alpha: the learning rate, as a multiple of that of source training.
        steps: the number of steps on each batch.
    """

    in_paper: ClassVar[str] = "SHOTIM"

    def learning(self) -> tuple[nn.Module, ...]:
        """Returns the parts that compute features."""
        return (self.model.encoder, self.model.norm)

    def loss(self, logits: Tensor) -> Tensor:
        """Returns the loss of information maximization."""
        return information_maximization(logits)


def pseudo_label_loss(logits: Tensor, threshold: float) -> Tensor | None:
    """Returns the mean cross-entropy () of logits (B, C) with their own classes, over rows above the threshold.

    Returns None if there is no such row.
    """
    confidence, labels = logits.detach().softmax(1).max(1)
    confident = confidence > threshold
    if not confident.any():
        return None
    return cross_entropy(logits[confident], labels[confident])


def information_maximization(logits: Tensor) -> Tensor:
    """Returns the mean entropy of rows (B, C) minus the entropy of their mean: low if they are certain and varied."""
    probs = logits.softmax(1)
    negative_entropy = (probs * logits.log_softmax(1)).sum(1).mean()
    mean = probs.mean(0)
    negative_entropy_of_mean = (mean * (mean + 1e-5).log()).sum()
    return negative_entropy_of_mean - negative_entropy
