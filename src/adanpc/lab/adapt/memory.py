"""Few images are kept, and learned from now and then, for streams whose neighbors in time are alike: NOTE, RoTTA."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, BatchError, Source, descend
from adanpc.lab.adapt.batchnorm import InstanceAware, Renormalized, Robust, learning, replace_batchnorm
from adanpc.lab.adapt.entropy import entropy
from adanpc.lab.adapt.exemplars import BalancedReservoir, Exemplar, Exemplars, TimelyMemory
from adanpc.lab.adapt.teacher import approach, trainable_scales, view


class _Rehearsing(Adapter):
    """Answers, offers every image to a memory, and learns from the memory after every so many images.

    A batch that crosses such a point is cut there, so that answers do not depend on how the stream is cut.

    Args:
        memory: empty.
        every: after how many images it learns.
    """

    def __init__(self, source: Source, memory: Exemplars, every: int) -> None:
        super().__init__(source)
        if every < 1:
            raise AdaNPCError(f"every must be at least 1 image, got {every}")
        self.memory, self.every = memory, every
        self.seen = 0  # images of the stream

    @property
    @abstractmethod
    def classifier(self) -> nn.Module:
        """What answers: images to logits, each image for itself."""

    @abstractmethod
    def learn(self) -> None:
        """One step on the images in the memory."""

    def moving(self) -> set[str]:
        """The scales and shifts of normalization layers, and the running statistics of BatchNorm layers."""
        scales = {name for name, value in self.named_parameters(remove_duplicate=False) if value.requires_grad}
        layers = [name for name, module in self.named_modules() if isinstance(module, Renormalized)]
        return scales | {f"{name}.layer.{buffer}" for name in layers for buffer in ("running_mean", "running_var")}

    def answer(self, batch: Tensor) -> Tensor:
        """Probabilities (B, C); what is learned from the first rows changes those of later ones."""
        if self.memory.kept and self.memory.kept[0].image.shape != batch.shape[1:]:
            kept, new = tuple(self.memory.kept[0].image.shape), tuple(batch.shape[1:])
            raise BatchError(f"images in memory have shape {kept}, these have {new}: resize them, or reset the adapter")
        answers = []
        while len(batch):
            rows, batch = batch.tensor_split([self.every - self.seen % self.every])
            answers.append(self._look(rows))
            if self.seen % self.every == 0:
                self.learn()
        return torch.cat(answers)

    @torch.no_grad()
    def _look(self, rows: Tensor) -> Tensor:
        logits = self.classifier(rows)
        labels, uncertainties = logits.argmax(1).tolist(), entropy(logits).tolist()
        for row, label, uncertainty in zip(rows, labels, uncertainties, strict=True):
            self.memory.add(Exemplar(row.clone(), label, uncertainty))  # a view would keep the whole batch
        self.seen += len(rows)
        probs: Tensor = logits.softmax(1)
        return probs

    def extra(self) -> dict[str, Any]:
        """The memory, and how many images were seen."""
        return {"memory": self.memory.state(), "seen": self.seen}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts them back."""
        self.memory.load(extra["memory"], self.model.device)
        self.seen = extra["seen"]


class NOTE(_Rehearsing):
    """Normalizes each image by itself where it must, and descends the entropy of a class-balanced memory.

    BatchNorm layers become ``InstanceAware``; scales and shifts of all normalization layers are trained. A model
    without BatchNorm is used as it is, with the memory alone.

    Args:
        lr: of Adam.
        capacity: of the memory.
        every: after how many images it learns.
        k: how many standard errors an image's statistics may be off, before they count.
        share: how far the running statistics move toward those of the memory, with each step.

    Paper: Gong et al., NOTE: Robust Continual Test-Time Adaptation Against Temporal Correlation, NeurIPS 2022.

    Differs from the published code: the source model is trained with instance-aware layers there, here they replace
    BatchNorm in a model that did not know of them; the loss is not divided by the number of classes, which Adam hardly
    notices; dropout is off; GroupNorm and LayerNorm are trained, too.
    """

    # No search is published: a decade to each side of the default.
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"lr": (1e-5, 1e-4, 1e-3)}

    def __init__(
        self,
        source: Source,
        *,
        lr: float = 1e-4,
        capacity: int = 64,
        every: int = 64,
        k: float = 4.0,
        share: float = 0.01,
    ) -> None:
        super().__init__(source, BalancedReservoir(capacity, source.model.classes), every)
        replace_batchnorm(self.model, partial(InstanceAware, k=k, share=share))
        self.optimizers["adam"] = Adam(trainable_scales(self.model, "NOTE"), lr=lr)

    @property
    def classifier(self) -> nn.Module:
        """The model."""
        return self.model

    @torch.enable_grad()
    def learn(self) -> None:
        """One step on the mean entropy of the images in the memory."""
        with learning(self.model):
            loss = entropy(self.model(self.memory.images())).mean()
        descend(loss, self.optimizers["adam"])


class RoTTA(_Rehearsing):
    """A student learns, on changed views of a memory, the answers of a teacher that is its slow average.

    BatchNorm layers become ``Robust``, in both; scales and shifts of all normalization layers are trained. The teacher
    answers. The memory is balanced by class and prefers recent and certain images; older ones weigh less in the loss.
    A model without BatchNorm is used as it is, with teacher and memory alone.

    Args:
        lr: of Adam.
        capacity: of the memory.
        every: after how many images it learns.
        share: how far the statistics move toward those of the memory, with each step; alpha in the paper.
        momentum: of the teacher: this share of it stays in each step; 1 - nu in the paper.
        timeliness, uncertainty: how much age and entropy count in the memory; lambda_t and lambda_u in the paper.

    Paper: Yuan, Xie and Li, Robust Test-Time Adaptation in Dynamic Scenarios, CVPR 2023.

    Differs from the published code: a batch is cut where the model learns, there its later rows are answered by the
    model from before; views are those of ``CoTTA``; dropout is off; GroupNorm and LayerNorm are trained, too.
    """

    # No search is published: a decade to each side of the default.
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"lr": (1e-4, 1e-3, 1e-2)}
    memory: TimelyMemory

    def __init__(
        self,
        source: Source,
        *,
        lr: float = 1e-3,
        capacity: int = 64,
        every: int = 64,
        share: float = 0.05,
        momentum: float = 0.999,
        timeliness: float = 1.0,
        uncertainty: float = 1.0,
    ) -> None:
        super().__init__(source, TimelyMemory(capacity, source.model.classes, timeliness, uncertainty), every)
        replace_batchnorm(self.model, partial(Robust, share=share))
        self.momentum = momentum
        self.teacher = deepcopy(self.model)
        self.optimizers["adam"] = Adam(trainable_scales(self.model, "RoTTA"), lr=lr)

    @property
    def classifier(self) -> nn.Module:
        """The teacher."""
        return self.teacher

    def moving(self) -> set[str]:
        """The scales and shifts, and the running statistics of BatchNorm layers, in student and teacher."""
        names = super().moving()
        return names | {"teacher." + name.removeprefix("model.") for name in names if name.startswith("model.")}

    @torch.enable_grad()
    def learn(self) -> None:
        """One step of the student on the images in the memory, and one of the teacher toward it."""
        images = self.memory.images()
        with learning(self.teacher), torch.no_grad():
            answers = self.teacher(images).softmax(1)
        with learning(self.model):
            logits = self.model(view(images))
        ages = torch.tensor([one.age / self.memory.capacity for one in self.memory.kept], device=images.device)
        descend(timely_loss(logits, answers, ages), self.optimizers["adam"])
        approach(self.teacher.parameters(), self.model.parameters(), 1 - self.momentum)


def timely_loss(logits: Tensor, answers: Tensor, ages: Tensor) -> Tensor:
    """The mean () of the cross-entropies of logits (n, C) with answers (n, C), each times 1 / (1 + exp(age)).

    Args:
        logits: the student's, with gradients.
        answers: the teacher's probabilities.
        ages: (n,) in units of the memory's capacity.
    """
    return (cross_entropy(logits, answers, reduction="none") * torch.sigmoid(-ages)).mean()
