"""What every training algorithm is: a model, a loss over one batch from each domain, and an optimizer."""

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
    """Samples of one domain: images (B, C, H, W), labels (B,), and keys (B,) that name them among all source rows."""

    images: Tensor
    labels: Tensor
    keys: Tensor


# Gives features (n, D), labels (n,) and keys (n,) of n source samples drawn at random, or of all if n is None.
Sampler = Callable[[int | None], tuple[Tensor, Tensor, Tensor]]


class Algorithm(nn.Module, ABC):
    """Trains ``model`` on several domains; the trained ``model`` is the product.

    Most algorithms are a ``loss``; those that step otherwise override ``update``. Everything that must survive a
    restart is a parameter, a buffer, a sub-module, an entry of ``optimizers``, or the step.

    Args:
        model: is trained in place. An algorithm may replace its encoder or head by its own.
        domains: how many there are; each update brings one batch from each, in this order.
        lr, weight_decay: of Adam.
    """

    space: ClassVar[Mapping[str, Draw]] = {}  # what a random search draws, beside what all algorithms share
    erm: ClassVar[Mapping[str, Any] | None] = None  # the settings with which it equals ERM, if there are any
    aligned: ClassVar[bool] = False  # whether "penalty" is zero if all domains bring the same batch
    needs: ClassVar[int] = 1  # the least number of domains
    photo_settings: ClassVar[Mapping[str, Any]] = {}  # defaults for photos, "batch" among them, where they are others
    photo_space: ClassVar[Mapping[str, Draw]] = {}  # what a random search draws for photos, where that is otherwise
    paced: ClassVar[tuple[str, ...]] = ()  # settings that count steps, and are scaled with the length of training

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
        self.parallel: Callable[[Sequence[Batch]], tuple[Tensor, dict[str, Tensor]]] | None = None

    def prepare(self, sampler: Sampler) -> None:
        """Called before each update, for algorithms that must see more of the source than a batch; most need not."""

    def source_vote(self, sampler: Sampler) -> AdaNPC | None:
        """The vote of source rows that will answer in place of the head; None if the head itself will.

        A run is evaluated, and its best model chosen, by whichever of them answers.

        Args:
            sampler: gives the rows, as the model encodes them now.
        """
        return None

    @abstractmethod
    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to descend, and its parts to report; changes nothing but buffers that follow the data."""

    def update(self, batches: Sequence[Batch]) -> dict[str, float]:
        """One step of training on one batch from each domain; the numbers to report, ``loss`` among them."""
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
        """Makes one step of an optimizer, with gradients of this loss alone."""
        self.optimizers[optimizer].zero_grad()
        loss.backward()
        self.optimizers[optimizer].step()

    def distribute(self) -> None:
        """From now on averages gradients over the processes of the group, which must start with equal weights.

        The reported numbers stay those of this process. What is computed over a batch, such as a covariance, is
        computed over this process's share of it.
        """
        if type(self).update is not Algorithm.update:
            raise AdaNPCError(
                f"{type(self).__name__} makes several steps in each update and trains in one process only"
            )
        parallel = DistributedDataParallel(_Loss(self))
        self.parallel = lambda batches: cast(tuple[Tensor, dict[str, Tensor]], parallel(batches))

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of inputs."""
        return cast(Tensor, self.model(images))

    def adam(self, *modules: nn.Module) -> Optimizer:
        """A new Adam over the parameters of these modules."""
        parameters: list[nn.Parameter] = []
        for module in modules:
            parameters.extend(module.parameters())
        return Adam(parameters, lr=self.lr, weight_decay=self.weight_decay)

    def checkpoint(self) -> dict[str, Any]:
        """All that ``restore`` needs: dicts, lists and tuples of tensors, numbers and strings."""
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return {"weights": self.state_dict(), "optimizers": optimizers, "step": self.step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where ``checkpoint`` was taken."""
        self.load_state_dict(state["weights"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(deepcopy(state["optimizers"][name]))  # torch would share its tensors
        self.step = state["step"]

    def _check(self, batches: Sequence[Batch]) -> None:
        if len(batches) != self.domains:
            raise AdaNPCError(f"expected one batch from each of {self.domains} domains, got {len(batches)}")
        if not all(len(batch.labels) for batch in batches):
            raise AdaNPCError("a batch has no rows: every domain must bring at least one sample")


class _Loss(nn.Module):
    """The loss as a module's forward, since that is where torch prepares to synchronize gradients."""

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__()
        self.algorithm = algorithm

    def forward(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        return self.algorithm.loss(batches)


def losses(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """The mean cross-entropy of each domain (domains,), with one pass over all images."""
    logits = model(torch.cat([batch.images for batch in batches]))
    return risks(logits, batches)


def risks(logits: Tensor, batches: Sequence[Batch]) -> Tensor:
    """The mean cross-entropy of each domain (domains,), from logits (n, classes) of all batches, one after another."""
    sizes = [len(batch.labels) for batch in batches]
    each = []
    for domain_logits, batch in zip(logits.split(sizes), batches, strict=True):
        each.append(cross_entropy(domain_logits, batch.labels))
    return torch.stack(each)
