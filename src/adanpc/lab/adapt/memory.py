"""Methods that learn from a small memory of images, for streams whose consecutive images are alike: NOTE, RoTTA."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from adanpc import require
from adanpc.lab.adapt.adapter import Adapter, BatchError, Source, descend
from adanpc.lab.adapt.batchnorm import InstanceAware, Renormalized, Robust, learning, replace_batchnorm
from adanpc.lab.adapt.entropy import entropy
from adanpc.lab.adapt.exemplars import BalancedReservoir, Exemplar, Exemplars, TimelyMemory
from adanpc.lab.adapt.teacher import approach, trainable_scales, view


class _MemoryMethod(Adapter, ABC):
    """Answers, offers every image to a memory, and learns from the memory after every ``every`` images.

    A batch that goes past such a point is split there, so answers do not depend on the batch size.

    Args:
        memory: an empty memory.
        every: the number of images between two learning steps.
    """

    def __init__(self, source: Source, memory: Exemplars, every: int) -> None:
        super().__init__(source)
        self.memory = memory
        self.every = require.whole("every", every, least=1)
        self.seen = 0  # images of the stream so far

    @property
    @abstractmethod
    def classifier(self) -> nn.Module:
        """The module that answers: it maps images to logits, each image independently of the others."""

    @abstractmethod
    def learn(self) -> None:
        """Makes one step on the images in the memory."""

    def moving(self) -> set[str]:
        """Returns the names of trained scales and shifts, and of the running statistics of BatchNorm layers."""
        # With duplicates: a weight that is used in several places has several names in ``state_dict``.
        names = {name for name, value in self.named_parameters(remove_duplicate=False) if value.requires_grad}
        for name, module in self.named_modules():
            if isinstance(module, Renormalized):
                names.add(f"{name}.layer.running_mean")
                names.add(f"{name}.layer.running_var")
        return names

    def answer(self, batch: Tensor) -> Tensor:
        """Returns probabilities (B, C); learning from the first rows may change the answers to later ones."""
        self._check_shape(batch)
        answers = []
        while len(batch):
            until_learning = self.every - self.seen % self.every  # images until the next learning step
            rows, batch = batch.tensor_split([until_learning])
            answers.append(self._answer_and_keep(rows))
            if self.seen % self.every == 0:
                self.learn()
        return torch.cat(answers)

    def _check_shape(self, batch: Tensor) -> None:
        """Raises BatchError if the images do not have the shape of those in the memory."""
        if not self.memory.kept:
            return
        kept = tuple(self.memory.kept[0].image.shape)
        new = tuple(batch.shape[1:])
        if kept != new:
            raise BatchError(f"images in memory have shape {kept}, these have {new}: resize them, or reset the adapter")

    @torch.no_grad()
    def _answer_and_keep(self, rows: Tensor) -> Tensor:
        """Returns the probabilities (B, C) of images, and offers all of them to the memory."""
        logits = self.classifier(rows)
        labels = logits.argmax(1).tolist()
        uncertainties = entropy(logits).tolist()
        for row, label, uncertainty in zip(rows, labels, uncertainties, strict=True):
            self.memory.add(Exemplar(row.clone(), label, uncertainty))  # a view would keep the whole batch alive
        self.seen += len(rows)
        probs: Tensor = logits.softmax(1)
        return probs

    def extra(self) -> dict[str, Any]:
        """Returns the memory and the number of images seen."""
        return {"memory": self.memory.state(), "seen": self.seen}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts back the memory and the number of images seen."""
        self.memory.load(extra["memory"], self.model.device)
        self.seen = extra["seen"]


class NOTE(_MemoryMethod):
    """Corrects the statistics of unusual images, and minimizes the entropy of the answers on a class-balanced memory.

    BatchNorm layers become ``InstanceAware``; the scales and shifts of all normalization layers are trained. In a model
    without BatchNorm no layer is replaced, and only the memory is used.

    Paper:
        Gong et al., NOTE: Robust Continual Test-Time Adaptation Against Temporal Correlation, NeurIPS 2022.

    Differs from the published code:
        The published source model is trained with instance-aware layers; here they replace BatchNorm in a model that
        was trained without them. The loss is not divided by the number of classes, which makes little difference to
        Adam. Dropout is off. GroupNorm and LayerNorm are trained, too.

    Args:
        lr: the learning rate of Adam.
        capacity: the number of images in the memory.
        every: the number of images between two learning steps.
        k: by how many standard errors the statistics of an image may differ before they count.
        share: how far the running statistics move toward those of the memory in each step.
    """

    # No search is published, so the grid spans a factor of ten on each side of the default.
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
        memory = BalancedReservoir(capacity, source.model.classes)
        super().__init__(source, memory, every)
        replace_batchnorm(self.model, partial(InstanceAware, k=k, share=share))
        self.optimizers["adam"] = Adam(trainable_scales(self.model, "NOTE"), lr=lr)

    @property
    def classifier(self) -> nn.Module:
        """The model."""
        return self.model

    @torch.enable_grad()
    def learn(self) -> None:
        """Makes one step on the mean entropy of the images in the memory."""
        with learning(self.model):
            loss = entropy(self.model(self.memory.images())).mean()
        descend(loss, self.optimizers["adam"])


class RoTTA(_MemoryMethod):
    """Trains a student, on random views of a memory, to answer like its teacher, a slow moving average of the student.

    The teacher answers. BatchNorm layers become ``Robust`` in both; the scales and shifts of all normalization layers
    are trained. The memory is balanced by class and prefers recent and certain images; older ones have less weight in
    the loss. In a model without BatchNorm no layer is replaced, and only teacher and memory are used.

    Paper:
        Yuan, Xie and Li, Robust Test-Time Adaptation in Dynamic Scenarios, CVPR 2023.

    Differs from the published code:
        A batch is split where the model learns; the published code answers its later rows with the model as it was
        before. Views are those of ``CoTTA``. Dropout is off. GroupNorm and LayerNorm are trained, too.

    Args:
        lr: the learning rate of Adam.
        capacity: the number of images in the memory.
        every: the number of images between two learning steps.
        share: how far the statistics move toward those of the memory in each step; alpha in the paper.
        momentum: the share of itself that the teacher keeps in each step; 1 - nu in the paper.
        timeliness, uncertainty: how much age and entropy count in the memory; lambda_t and lambda_u in the paper.
    """

    # No search is published, so the grid spans a factor of ten on each side of the default.
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
        memory = TimelyMemory(capacity, source.model.classes, timeliness, uncertainty)
        super().__init__(source, memory, every)
        replace_batchnorm(self.model, partial(Robust, share=share))
        self.momentum = momentum
        self.teacher = deepcopy(self.model)
        self.optimizers["adam"] = Adam(trainable_scales(self.model, "RoTTA"), lr=lr)

    @property
    def classifier(self) -> nn.Module:
        """The teacher."""
        return self.teacher

    def moving(self) -> set[str]:
        """Returns the names of scales, shifts and running statistics, in student and teacher."""
        names = super().moving()
        student = [name.removeprefix("model.") for name in names if name.startswith("model.")]
        return names | {f"teacher.{name}" for name in student}

    @torch.enable_grad()
    def learn(self) -> None:
        """Makes one step of the student on the images in the memory, and one of the teacher toward the student."""
        images = self.memory.images()
        # The statistics of the teacher's layers follow the images themselves, those of the student's layers the views.
        with learning(self.teacher), torch.no_grad():
            answers = self.teacher(images).softmax(1)
        with learning(self.model):
            logits = self.model(view(images))
        ages = [exemplar.age / self.memory.capacity for exemplar in self.memory.kept]
        loss = timely_loss(logits, answers, torch.tensor(ages, device=images.device))
        descend(loss, self.optimizers["adam"])
        approach(self.teacher.parameters(), self.model.parameters(), 1 - self.momentum)


def timely_loss(logits: Tensor, answers: Tensor, ages: Tensor) -> Tensor:
    """Returns the mean cross-entropy () of logits with answers, each row weighted by 1 / (1 + exp(age)).

    Args:
        logits: (n, C) of the student, with gradients.
        answers: (n, C) the probabilities of the teacher.
        ages: (n,) in units of the memory's capacity.
    """
    losses = cross_entropy(logits, answers, reduction="none")
    return (losses * torch.sigmoid(-ages)).mean()
