"""Algorithms that make the gradients of domains agree: MLDG, Fish, Fishr."""

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
    """Adds to the loss of one domain the loss of another domain after a trial step on the first.

    So a step that helps one domain should help another. At each update the domains are randomly split into meta-train
    and meta-test, and each meta-train domain is paired with one of the meta-test domains in turn. The trial step is the
    first step of a new Adam on the meta-train domain. The gradient of the meta-test loss treats it as a constant (first
    order).

    Domains pass through the model one by one, so a BatchNorm in training sees one at a time and needs two rows of each.
    Its running statistics follow all of these passes, including those after trial steps.

    Args:
        weight: of the meta-test loss (beta in the paper).
        n_meta_test: the number of meta-test domains; at least one domain is left for meta-train.

    Paper: Li, Yang, Song and Hospedales, Learning to Generalize: Meta-Learning for Domain Generalization, 2018.

    Differs from the published code: it also trains if ``n_meta_test`` is the number of all domains, batches of unequal
    size are not cut, and running statistics reach the model (in the published code they stay in the clones).
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
        """Returns the losses of meta-train domains, plus the weighted losses of meta-test domains after trial steps.

        The sum is divided by the number of all domains.
        """
        order = torch.randperm(self.domains).tolist()
        meta_test = order[: self.n_meta_test]
        meta_train = order[self.n_meta_test :]
        train_losses = []
        test_losses = []
        # If there are fewer meta-test than meta-train domains, they are used again.
        for train_domain, test_domain in zip(meta_train, cycle(meta_test), strict=False):
            train_loss, test_loss = self._pair(batches[train_domain], batches[test_domain])
            train_losses.append(train_loss)
            test_losses.append(test_loss)
        risks = torch.stack(train_losses)
        metas = torch.stack(test_losses)
        loss = (risks + self.weight * metas).sum() / self.domains
        return loss, {"risk": risks.detach().mean(), "meta": metas.detach().mean()}

    def _pair(self, train: Batch, test: Batch) -> tuple[Tensor, Tensor]:
        """Returns the loss on one batch, and the loss on the other after a trial step on the first."""
        parameters = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        risk = cross_entropy(self.model(train.images), train.labels)
        gradients = torch.autograd.grad(risk, list(parameters.values()), materialize_grads=True)
        after_trial = {}
        zeros = []  # terms of value 0 whose gradients are those of the risk
        for (name, value), gradient in zip(parameters.items(), gradients, strict=True):
            after_trial[name] = value - self._trial_step(value, gradient)
            zeros.append(((value - value.detach()) * gradient).sum())
        # This has the value and the gradients of the risk, but needs no second backward pass through the model.
        train_loss = risk.detach() + torch.stack(zeros).sum()
        logits = functional_call(self.model, after_trial, (test.images,))
        return train_loss, cross_entropy(logits, test.labels)

    def _trial_step(self, value: Tensor, gradient: Tensor) -> Tensor:
        """Returns what a new Adam subtracts from a parameter at its first step: the gradient over its own size."""
        gradient = gradient + self.weight_decay * value.detach()
        return self.lr * gradient / (gradient.abs() + EPSILON)


class Fish(Algorithm):
    """Makes one step on each domain in turn, then takes the weights part of the way back, which aligns gradients.

    Adam's averages continue from update to update. The domains come in a new random order each time. They pass through
    the model one by one, so a BatchNorm in training sees one at a time and needs two rows of each; its running
    statistics follow these passes and are not taken back.

    Args:
        meta_lr: the share of the way that is kept (epsilon in the paper).

    Paper: Shi et al., Gradient Matching for Domain Generalization, 2022.

    Differs from the published code: the order of domains is random instead of fixed, so that none is favored; running
    statistics are not interpolated as weights are.
    """

    space: ClassVar[Mapping[str, Draw]] = {"meta_lr": Choice((0.05, 0.1, 0.5))}
    needs: ClassVar[int] = 2

    def __init__(self, model: SourceModel, domains: int, *, meta_lr: float = 0.5, **adam: float) -> None:
        super().__init__(model, domains, **adam)
        self.meta_lr = meta_lr

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean loss of the given domains; each step of an update is on the loss of a single one."""
        return losses(self.model, batches).mean(), {}

    def update(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Makes a step on each domain, then takes the weights part of the way back; returns the mean loss."""
        self._check(batches)
        start = [parameter.detach().clone() for parameter in self.model.parameters()]
        domain_losses = []
        for domain in torch.randperm(self.domains).tolist():
            loss, _ = self.loss([batches[domain]])
            self.descend(loss)
            domain_losses.append(loss.detach())
        with torch.no_grad():
            # Only weights go back; running statistics, which are buffers, stay.
            for parameter, first in zip(self.model.parameters(), start, strict=True):
                parameter.copy_(first.lerp(parameter, self.meta_lr))
        self.step += 1
        return {"loss": float(torch.stack(domain_losses).mean())}


class Fishr(Penalized):
    """Penalizes how much the variances of the head's gradients differ between domains.

    The population variance over samples is computed for each weight and bias of the head. It is summed over steps,
    where each step counts ``ema`` times as much as the next. The penalty is the mean squared distance of these sums
    from their mean over domains.

    Args:
        weight: of the penalty from step ``anneal`` on; before, it is 0.
        anneal: a step in a training of 5,000 steps; ``Spec`` scales the default to trainings of other lengths.
        ema: the share of a sum that is left after a step; below 1.

    Paper: Rame, Dancette and Cord, Fishr: Invariant Gradient Variances for Out-of-Distribution Generalization, 2022.

    Differs from the published code: gradients are computed in closed form; every domain counts the same, whatever its
    batch size.
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
    sums: Tensor  # (domains, C, D + 1), or (domains, C, D) without a bias

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
        """Adds this batch to the sums; returns their variance between domains, averaged over weights and biases."""
        variances = torch.stack([self._variance(output) for output in outputs])
        sums = self.ema * self.sums + variances
        self.sums.copy_(sums.detach())
        return sums.var(0, correction=0).mean()

    def _variance(self, output: Outputs) -> Tensor:
        """Returns the variance over samples of the gradient for each weight and bias (C, D + 1)."""
        count = len(output.labels)
        # The gradient of a sample is the outer product of its error and its input, so the sums over samples of these
        # gradients and of their squares are matrix products.
        errors = output.logits.softmax(1) - one_hot(output.labels, output.logits.shape[1])  # (B, C)
        inputs = output.features  # (B, D)
        if self.bias:
            inputs = pad(inputs, (0, 1), value=1.0)  # (B, D + 1): a bias is the weight of a constant input
        total = errors.T @ inputs  # (C, D + 1)
        total_of_squares = errors.square().T @ inputs.square()
        return total_of_squares / count - (total / count).square()
