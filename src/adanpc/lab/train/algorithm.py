"""The interface of every training algorithm: a model, a loss over one batch from each domain, and an optimizer.

What you write for an algorithm of your own is a subclass of ``Algorithm`` with a ``loss``, and class attributes that
state facts about it. Algorithms that penalize the outputs of domains subclass ``Penalized`` in ``penalty.py`` instead.
What you get is ``update``, ``checkpoint`` and ``restore``. Few algorithms need ``prepare``, ``source_vote`` or an
``update`` of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer

from adanpc.core import AdaNPC
from adanpc.errors import AdaNPCError
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.search import Draw


class Batch(NamedTuple):
    """Samples of one domain: images (B, C, H, W), labels (B,), and keys (B,), their numbers among all source rows."""

    images: Tensor
    labels: Tensor
    keys: Tensor


# Returns features (n, D), labels (n,) and keys (n,) of n source samples drawn at random, or of all if n is None.
Sampler = Callable[[int | None], tuple[Tensor, Tensor, Tensor]]


class Algorithm(nn.Module, ABC):
    """Trains ``model`` on several domains; the result is the trained ``model``.

    Most algorithms only implement ``loss``; those whose update is not a single step of descent override ``update``.
    Everything that must survive a restart is a parameter, a buffer, a submodule, an entry of ``optimizers``, or the
    step.

    Args:
        model: trained in place. An algorithm may replace its encoder or head by its own.
        domains: the number of domains; each update takes one batch from each, always in the same order.
        lr, weight_decay: of Adam.
    """

    # Facts about the algorithm, which specs, searches and contracts use.
    needs: ClassVar[int] = 1  # the smallest number of domains
    space: ClassVar[Mapping[str, Draw]] = {}  # what a random search draws, in addition to what all algorithms share
    photo_settings: ClassVar[Mapping[str, Any]] = {}  # defaults for photos, "batch" included, if they are different
    photo_space: ClassVar[Mapping[str, Draw]] = {}  # what a random search draws for photos, if it is different
    paced: ClassVar[tuple[str, ...]] = ()  # settings that count steps, and are scaled with the length of training
    erm: ClassVar[Mapping[str, Any] | None] = None  # settings with which it equals ERM, if there are any
    aligned: ClassVar[bool] = False  # whether the reported "penalty" is zero if all domains have the same batch

    def __init__(self, model: SourceModel, domains: int, *, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__()
        if domains < self.needs:
            raise AdaNPCError(f"{type(self).__name__} needs at least {self.needs} source domains, got {domains}")
        if not (lr >= 0 and weight_decay >= 0):
            raise AdaNPCError(f"lr and weight_decay must not be below 0, got {lr} and {weight_decay}")
        self.model = model
        self.domains = domains
        self.lr = lr
        self.weight_decay = weight_decay
        self.step = 0  # the number of updates so far
        self.optimizers: dict[str, Optimizer] = {"model": self.adam(model)}
        # Computes the loss with gradients that are averaged over processes; None in a single process.
        self.parallel: Callable[[Sequence[Batch]], tuple[Tensor, dict[str, Tensor]]] | None = None

    @abstractmethod
    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss () to minimize and its parts to report; changes only buffers that follow the data."""

    def prepare(self, sampler: Sampler) -> None:
        """Is called before each update; for algorithms that must see more of the source than a batch.

        Args:
            sampler: returns source samples, as the model encodes them now.
        """

    def source_vote(self, sampler: Sampler) -> AdaNPC | None:
        """Returns the vote of source rows that will answer in place of the head; None if the head will answer.

        A run is evaluated, and its best model chosen, by whichever of the two answers.

        Args:
            sampler: returns source samples, as the model encodes them now.
        """
        return None

    def update(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Makes one step of training on one batch from each domain; returns numbers to report, including ``loss``."""
        self._check(batches)
        compute_loss = self.loss if self.parallel is None else self.parallel
        loss, parts = compute_loss(batches)
        self.descend(loss)
        self.step += 1
        report = {"loss": float(loss.detach())}
        for name, value in parts.items():
            report[name] = float(value)
        return report

    def descend(self, loss: Tensor, optimizer: str = "model") -> None:
        """Makes one step of an optimizer with the gradients of this loss alone."""
        self.optimizers[optimizer].zero_grad()
        loss.backward()
        self.optimizers[optimizer].step()

    def distribute(self) -> None:
        """Averages gradients over the processes of the group from now on; all must start with equal weights.

        The reported numbers remain those of this process. Whatever is computed over a batch, such as a covariance, is
        computed over this process's share of the batch.
        """
        if type(self).update is not Algorithm.update:
            raise AdaNPCError(
                f"{type(self).__name__} makes several steps in each update and trains in one process only"
            )
        parallel = DistributedDataParallel(_Loss(self))
        # Behind a lambda: as an attribute, the wrapper, which contains this algorithm, would become a submodule of it.
        self.parallel = lambda batches: cast(tuple[Tensor, dict[str, Tensor]], parallel(batches))

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits (B, classes) of inputs."""
        return cast(Tensor, self.model(images))

    def adam(self, *modules: nn.Module) -> Optimizer:
        """Returns a new Adam over the parameters of these modules."""
        parameters: list[nn.Parameter] = []
        for module in modules:
            parameters.extend(module.parameters())
        return Adam(parameters, lr=self.lr, weight_decay=self.weight_decay)

    def checkpoint(self) -> dict[str, Any]:
        """Returns all that ``restore`` needs, as dicts, lists and tuples of tensors, numbers and strings."""
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return {"weights": self.state_dict(), "optimizers": optimizers, "step": self.step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from where ``checkpoint`` was taken."""
        self.load_state_dict(state["weights"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(deepcopy(state["optimizers"][name]))  # without a copy, torch shares the tensors
        self.step = state["step"]

    def _check(self, batches: Sequence[Batch]) -> None:
        """Refuses batches that are not one from each domain, or that are empty."""
        if len(batches) != self.domains:
            raise AdaNPCError(f"expected one batch from each of {self.domains} domains, got {len(batches)}")
        if not all(len(batch.labels) for batch in batches):
            raise AdaNPCError("a batch has no rows: every domain must have at least one sample")


class _Loss(nn.Module):
    """The loss as the forward of a module: torch synchronizes gradients only if the loss is computed by a forward."""

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__()
        self.algorithm = algorithm

    def forward(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        return self.algorithm.loss(batches)


def losses(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Returns the mean cross-entropy of each domain (domains,), with one pass over all images."""
    logits = model(torch.cat([batch.images for batch in batches]))
    return risks(logits, batches)


def risks(logits: Tensor, batches: Sequence[Batch]) -> Tensor:
    """Returns the mean cross-entropy of each domain (domains,), given logits (n, classes) of all batches in order."""
    sizes = [len(batch.labels) for batch in batches]
    domain_risks = []
    for domain_logits, batch in zip(logits.split(sizes), batches, strict=True):
        domain_risks.append(cross_entropy(domain_logits, batch.labels))
    return torch.stack(domain_risks)
