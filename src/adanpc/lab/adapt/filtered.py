"""Methods that minimize the entropy of selected answers only: ETA, and EATA, which also penalizes forgetting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, log
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from adanpc import require
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Source
from adanpc.lab.adapt.entropy import EntropyDescent, entropy

# No search is published, so the grid spans a factor of ten on each side of the published rate.
GRID: Mapping[str, Sequence[Any]] = {"lr": (2.5e-5, 2.5e-4, 2.5e-3), "optimizer": ("sgd", "adam")}
FISHER_BATCH = 64  # source images in a batch, as in the published code: the Fisher weights depend on it


def usual_similarity(classes: int) -> float:
    """Returns the largest cosine between an answer and the average answer at which ETA still learns from the answer.

    A confident answer and a uniform average of C classes have the cosine C ** -0.5, so no single limit fits all: 0.05,
    published for 1,000 classes, would reject every confident answer with 10 classes. This is the power of C that passes
    through both published values, 0.4 for 10 classes and 0.05 for 1,000; it lies above that cosine for every C.
    """
    exponent = log(8) / log(100)
    return float(0.4 * (10 / classes) ** exponent)


def usual_weight(classes: int) -> float:
    """Returns the weight of EATA's penalty for this number of classes C.

    This is the power of C that passes through both published values, 1 for 10 classes and 2,000 for 1,000.
    """
    exponent = log(2000) / log(100)
    return float((classes / 10) ** exponent)


class Selection(nn.Module):
    """Selects confident answers that differ from the average answer, and weights them.

    The average answer is a running mean over the selected answers.

    Args:
        classes: the number of classes C.
        margin: the largest entropy of a confident answer, as a share of its largest possible value ln C.
        similarity: the largest cosine to the average answer; by default ``usual_similarity``.
    """

    average: Tensor

    def __init__(self, classes: int, margin: float, similarity: float | None) -> None:
        super().__init__()
        require.positive("margin", margin)
        if similarity is None:
            similarity = usual_similarity(classes)
        self.margin = margin * log(classes)
        self.similarity = similarity
        self.register_buffer("average", torch.zeros(classes))  # (C,), zero until an answer is selected

    def loss(self, logits: Tensor, uncertainty: Tensor | None = None) -> Tensor | None:
        """Returns the weighted mean entropy () of the selected rows of logits (B, C), or None if none is selected.

        Args:
            logits: (B, C).
            uncertainty: (B,) to use in place of the entropy; by default the entropy of the softmax.
        """
        if uncertainty is None:
            uncertainty = entropy(logits)
        probs = logits.detach().softmax(1)
        selected = uncertainty < self.margin
        if self.average.any():
            cosine = cosine_similarity(self.average[None], probs)
            selected &= cosine.abs() < self.similarity
        if not selected.any():
            return None
        self.update_average(probs[selected].mean(0))
        weight = (self.margin - uncertainty.detach()).exp()  # a constant: only the entropy itself has a gradient
        return (weight * uncertainty)[selected].mean()

    def update_average(self, mean: Tensor) -> None:
        """Moves the average answer (C,) a tenth of the way to a new mean; the first mean becomes the average."""
        if self.average.any():
            mean = self.average.lerp(mean, 0.1)
        self.average.copy_(mean)


class ETA(EntropyDescent):
    """Tent on the answers that are confident and unlike the average answer; the most confident have the most weight.

    Paper:
        Niu et al., Efficient Test-Time Model Adaptation without Forgetting, ICML 2022, without its penalty.

    Differs from the published code:
        The limits depend on the number of classes; for 10 and 1,000 classes they are the published ones.

    Args:
        margin: the largest entropy of an answer to learn from, as a share of ln C; E0 in the paper.
        similarity: the largest cosine to the average answer; by default it depends on the number of classes.
        trains: norm, or head, where BatchNorm layers keep the statistics of the source.
        lr: the learning rate; by default 2.5e-4 with sgd and 1e-3 with adam.
        optimizer: sgd with momentum 0.9, or adam.
    """

    grid: ClassVar[Mapping[str, Sequence[Any]]] = GRID

    def __init__(
        self,
        source: Source,
        *,
        margin: float = 0.4,
        similarity: float | None = None,
        trains: str = "norm",
        lr: float | None = None,
        optimizer: str = "sgd",
    ) -> None:
        super().__init__(source, trains=trains, lr=lr, optimizer=optimizer, steps=1)
        self.selection = Selection(self.model.classes, margin, similarity).to(self.model.device)

    def moving(self) -> set[str]:
        """Returns the names of the trained parameters and of the average answer."""
        return super().moving() | {"selection.average"}

    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """Makes one step on the weighted mean entropy of the selected answers, if there are any."""
        loss = self.selection.loss(logits, self.uncertainty(logits))
        if loss is not None:
            self.descend(self.objective(loss))

    def objective(self, loss: Tensor) -> Tensor:
        """Returns the loss () to minimize, given the weighted mean entropy () of the selected answers."""
        return loss


class EATA(ETA):
    """ETA, with a penalty on changing the weights that the source model's answers on source images depend on.

    Paper:
        Niu et al., Efficient Test-Time Model Adaptation without Forgetting, ICML 2022.

    Differs from the published code:
        In the same way as ETA; the weight of the penalty, too, depends on the number of classes.

    Args:
        margin, similarity, trains, lr, optimizer: see ``ETA``.
        weight: of the penalty; by default it depends on the number of classes.
        samples: how many source images the Fisher weights are computed from; if there are fewer, all of them.
    """

    def __init__(
        self,
        source: Source,
        *,
        margin: float = 0.4,
        similarity: float | None = None,
        weight: float | None = None,
        samples: int = 2000,
        trains: str = "norm",
        lr: float | None = None,
        optimizer: str = "sgd",
    ) -> None:
        if weight is None:
            weight = usual_weight(source.model.classes)
        if not weight >= 0:
            raise AdaNPCError(f"weight must be 0 or more, got {weight}")
        require.whole("samples", samples, least=1)
        super().__init__(source, margin=margin, similarity=similarity, trains=trains, lr=lr, optimizer=optimizer)
        self.weight = weight
        self.fisher = self._fisher(source, samples)

    def objective(self, loss: Tensor) -> Tensor:
        """Returns the loss plus the weighted penalty."""
        return loss + self.weight * self.penalty()

    def penalty(self) -> Tensor:
        """Returns the sum () of the squared changes of the weights since the source, each times its Fisher weight."""
        terms = []
        for fisher, now, start in zip(self.fisher, self.trained, self.start, strict=True):
            terms.append((fisher * (now - start).square()).sum())
        return torch.stack(terms).sum()

    def _fisher(self, source: Source, samples: int) -> list[Tensor]:
        """Returns the mean square of each trained parameter's gradient, over batches of source images.

        The labels are the model's own answers.
        """
        if source.images is None or len(source.labels) == 0:
            raise AdaNPCError("EATA looks at source images: give Source(images=…), or use ETA, which needs none")
        rows = source.mixed(samples)
        # Batches of nearly equal size, because each counts the same in the mean.
        batches = rows.tensor_split(ceil(len(rows) / FISHER_BATCH))
        means = [torch.zeros_like(parameter) for parameter in self.trained]
        for batch in batches:
            images = source.images(batch).to(self.model.device)
            with torch.enable_grad():
                logits = self.classify(images)
                gradients = self.gradients(cross_entropy(logits, logits.argmax(1)))
            for mean, gradient in zip(means, gradients, strict=True):
                mean += gradient.square() / len(batches)
        return means
