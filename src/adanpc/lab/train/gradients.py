"""Algorithms that compare the domains' gradients: MLDG, Fish, Fishr."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, one_hot, pad

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Algorithm, Batch, losses
from adanpc.lab.train.penalty import Outputs, Penalized
from adanpc.lab.train.search import Choice, Draw, Power, Uniform
from adanpc.require import whole

EPSILON = 1e-8  # of Adam


class MLDG(Algorithm):
    """A step that helps one domain should help another: the loss after a trial step counts beside the loss before it.

    At each update the domains are split at random into meta-train and meta-test, and each of the former is paired
    with one of the latter in turn. The trial step is the first of a new Adam on the meta-train domain. The gradient of
    the meta-test loss takes it as a constant (first order).

    Domains pass the model one by one, so a BatchNorm in training sees one at a time and needs two rows of each. Its
    running statistics follow all of these passes, those after trial steps too.

    Args:
        weight: of the meta-test loss (beta in the paper).
        n_meta_test: how many domains are meta-test; one at least is left for meta-train.

    Paper: Li, Yang, Song and Hospedales, Learning to Generalize: Meta-Learning for Domain Generalization, 2018.

    Differs from the published code: with as many meta-test domains as domains it still trains, batches of unequal
    size are not cut, and running statistics reach the model (there they stay in the clones).
    """

    space: ClassVar[Mapping[str, Draw]] = {"weight": Power(-1, 1), "n_meta_test": Choice((1, 2))}
    needs: ClassVar[int] = 2

    def __init__(
        self, model: SourceModel, domains: int, *, weight: float = 1.0, n_meta_test: int = 2, **adam: float
    ) -> None:
        super().__init__(model, domains, **adam)
        whole("n_meta_test", n_meta_test, least=1)
        self.weight = weight
        self.n_meta_test = min(n_meta_test, domains - 1)

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The losses of meta-train domains and, weighted, of meta-test domains after trial steps, over all domains."""
        order = torch.randperm(self.domains).tolist()
        meta_test = order[: self.n_meta_test]
        meta_train = order[self.n_meta_test :]
        train_losses = []
        test_losses = []
        for train_domain, test_domain in zip(meta_train, cycle(meta_test), strict=False):
            train_loss, test_loss = self._pair(batches[train_domain], batches[test_domain])
            train_losses.append(train_loss)
            test_losses.append(test_loss)
        risks = torch.stack(train_losses)
        metas = torch.stack(test_losses)
        loss = (risks + self.weight * metas).sum() / self.domains
        return loss, {"risk": risks.detach().mean(), "meta": metas.detach().mean()}

    def _pair(self, train: Batch, test: Batch) -> tuple[Tensor, Tensor]:
        """The loss on one batch, and the loss on the other after a trial step on the first."""
        parameters = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        risk = cross_entropy(self.model(train.images), train.labels)
        slopes = torch.autograd.grad(risk, list(parameters.values()), materialize_grads=True)
        after_trial = {}
        zeros = []  # with the gradient of the risk
        for (name, value), slope in zip(parameters.items(), slopes, strict=True):
            after_trial[name] = value - self._trial_step(value, slope)
            zeros.append(((value - value.detach()) * slope).sum())
        # The same value and gradient as the risk itself has, without a second pass back through the model.
        train_loss = risk.detach() + torch.stack(zeros).sum()
        logits = functional_call(self.model, after_trial, (test.images,))
        return train_loss, cross_entropy(logits, test.labels)

    def _trial_step(self, value: Tensor, slope: Tensor) -> Tensor:
        """What a new Adam subtracts from a parameter at its first step: the slope over its own size."""
        slope = slope + self.weight_decay * value.detach()
        return self.lr * slope / (slope.abs() + EPSILON)


class Fish(Algorithm):
    """Makes one step for each domain in turn and keeps only a part of them all: gradients come to agree.

    Adam's averages continue from update to update. The domains come in a new random order each time. They pass the
    model one by one, so a BatchNorm in training sees one at a time and needs two rows of each; its running statistics
    are those of the passes, and no part of them is taken back.

    Args:
        meta_lr: the part that is kept (epsilon in the paper).

    Paper: Shi et al., Gradient Matching for Domain Generalization, 2022.

    Differs from the published code: the order of domains is random (there it is always the same), so that none is
    favored; running statistics are not mixed as weights are.
    """

    space: ClassVar[Mapping[str, Draw]] = {"meta_lr": Choice((0.05, 0.1, 0.5))}
    needs: ClassVar[int] = 2

    def __init__(self, model: SourceModel, domains: int, *, meta_lr: float = 0.5, **adam: float) -> None:
        super().__init__(model, domains, **adam)
        self.meta_lr = meta_lr

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of the domains given; each step of an update descends that of one."""
        return losses(self.model, batches).mean(), {}

    def update(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Makes a step on each domain, then takes the weights part of the way back; reports the mean loss."""
        self._check(batches)
        start = [parameter.detach().clone() for parameter in self.model.parameters()]
        domain_losses = []
        for domain in torch.randperm(self.domains).tolist():
            loss, _ = self.loss([batches[domain]])
            self.descend(loss)
            domain_losses.append(loss.detach())
        with torch.no_grad():
            for parameter, first in zip(self.model.parameters(), start, strict=True):
                parameter.copy_(first.lerp(parameter, self.meta_lr))
        self.step += 1
        return {"loss": float(torch.stack(domain_losses).mean())}


class Fishr(Penalized):
    """Penalizes how far the variances of the head's gradients differ between domains.

    The variance (population) is over samples, for each weight and bias of the head. It is summed over steps, and each
    step counts ``ema`` times as much as the next. The penalty is the mean squared distance of these sums from those
    of the mean domain.

    Args:
        weight: of the penalty from step ``anneal`` on; 0 before.
        anneal: a step of a training of 5,000; ``Spec`` scales its default to trainings of other lengths.
        ema: how much of a sum is left after a step; below 1.

    Paper: Rame, Dancette and Cord, Fishr: Invariant Gradient Variances for Out-of-Distribution Generalization, 2022.

    Differs from the published code: gradients are in closed form; every domain counts the same, whatever its batch.
    """

    space: ClassVar[Mapping[str, Draw]] = {
        "weight": Power(1, 4),
        "anneal": Uniform(0, 5000),
        "ema": Uniform(0.9, 0.99),
    }
    paced: ClassVar[tuple[str, ...]] = ("anneal",)
    aligned: ClassVar[bool] = True
    needs: ClassVar[int] = 2
    before: ClassVar[float] = 0.0
    sums: Tensor

    def __init__(
        self,
        model: SourceModel,
        domains: int,
        *,
        weight: float = 1000.0,
        anneal: float = 1500,
        ema: float = 0.95,
        **adam: float,
    ) -> None:
        super().__init__(model, domains, weight=weight, anneal=anneal, **adam)
        if not isinstance(model.head, nn.Linear):
            raise AdaNPCError(f"Fishr needs a linear head, got {type(model.head).__name__}")
        if not 0 <= ema < 1:
            raise AdaNPCError(f"ema must be at least 0 and below 1, got {ema}")
        self.ema = ema
        self.bias = model.head.bias is not None
        width = model.dim + self.bias
        self.register_buffer("sums", torch.zeros(domains, model.classes, width, device=model.device))

    def penalty(self, outputs: Sequence[Outputs]) -> Tensor:
        """The variance between domains of the sums, which follow this batch; its mean over weights and biases."""
        variances = torch.stack([self._variance(output) for output in outputs])
        sums = self.ema * self.sums + variances
        self.sums.copy_(sums.detach())
        return sums.var(0, correction=0).mean()

    def _variance(self, output: Outputs) -> Tensor:
        """The variance over samples of the gradient in each weight and bias (C, D + 1)."""
        count = len(output.labels)
        # A sample's gradient is the product of its slope and its input, so its moments are products of matrices.
        slopes = output.logits.softmax(1) - one_hot(output.labels, output.logits.shape[1])  # (B, C)
        inputs = output.features  # (B, D)
        if self.bias:
            inputs = pad(inputs, (0, 1), value=1.0)  # (B, D + 1): a bias is the weight of a constant input
        total = slopes.T @ inputs  # (C, D + 1)
        total_of_squares = slopes.square().T @ inputs.square()
        return total_of_squares / count - (total / count).square()
