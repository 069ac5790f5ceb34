"""Tent, EATA and SAR with an entropy that leaves room for knowing nothing: COME."""

from __future__ import annotations

import torch
from torch import Tensor

from adanpc.lab.adapt.filtered import EATA
from adanpc.lab.adapt.reliable import SAR
from adanpc.lab.adapt.tent import Tent


def opinion_entropy(logits: Tensor) -> Tensor:
    """Returns the entropy (B,), in nats, of C + 1 masses: those of the classes, and one for knowing nothing.

    The masses are exp(x) of each class, and C, over their sum. The length of the logits (B, C) is held fixed, so that
    descending does not make answers surer by making logits longer.
    """
    lengths = logits.norm(dim=1, keepdim=True)
    fixed = logits / lengths.clamp(min=1e-12) * lengths.detach()
    classes = logits.shape[1]
    nothing = torch.full_like(fixed[:, :1], classes).log()
    masses = torch.cat([fixed, nothing], 1).softmax(1) + 1e-7
    return -(masses * masses.log()).sum(1)


class TentCOME(Tent):
    """Does what Tent does, with the entropy of ``opinion_entropy``.

    Paper:
        Zhang et al., COME: Test-time Adaption by Conservatively Minimizing Entropy, ICLR 2025.

    Differs from the published code:
        The mass for knowing nothing is the number of classes; there it is always 1000. What differs in Tent.

    Args:
        See ``Tent``.
    """

    in_paper = ""

    def uncertainty(self, logits: Tensor) -> Tensor:
        """Returns the entropy (B,) of the masses of logits (B, C)."""
        return opinion_entropy(logits)


class EATACOME(EATA):
    """Does what EATA does, with the entropy of ``opinion_entropy``, by which answers are selected and weighted, too.

    Paper:
        Zhang et al., COME: Test-time Adaption by Conservatively Minimizing Entropy, ICLR 2025.

    Differs from the published code:
        In the same ways as TentCOME and EATA.

    Args:
        See ``EATA``.
    """

    def uncertainty(self, logits: Tensor) -> Tensor:
        """Returns the entropy (B,) of the masses of logits (B, C)."""
        return opinion_entropy(logits)


class SARCOME(SAR):
    """Does what SAR does, with the entropy of ``opinion_entropy``, by which answers are selected, too.

    Paper:
        Zhang et al., COME: Test-time Adaption by Conservatively Minimizing Entropy, ICLR 2025.

    Differs from the published code:
        In the same ways as TentCOME and SAR.

    Args:
        See ``SAR``.
    """

    def uncertainty(self, logits: Tensor) -> Tensor:
        """Returns the entropy (B,) of the masses of logits (B, C)."""
        return opinion_entropy(logits)
