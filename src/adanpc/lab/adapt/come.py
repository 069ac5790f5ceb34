"""COME: Tent, EATA and SAR with an entropy that has an additional outcome for not knowing the class."""

from __future__ import annotations

import torch
from torch import Tensor

from adanpc.lab.adapt.filtered import EATA
from adanpc.lab.adapt.reliable import SAR
from adanpc.lab.adapt.tent import Tent


def opinion_entropy(logits: Tensor) -> Tensor:
    """Returns the entropy (B,), in nats, of C + 1 masses: one for each class, and one for not knowing the class.

    The masses are exp(x) for a class with logit x, and C for not knowing, divided by their sum. The length of the
    logits (B, C) counts as a constant, so that minimizing the entropy cannot raise the confidence by making the logits
    longer.
    """
    lengths = logits.norm(dim=1, keepdim=True)
    fixed = logits / lengths.clamp(min=1e-12) * lengths.detach()  # equal to the logits, but no gradient to the length
    classes = logits.shape[1]
    unknown = torch.full_like(fixed[:, :1], classes).log()
    masses = torch.cat([fixed, unknown], 1).softmax(1) + 1e-7
    return -(masses * masses.log()).sum(1)


class TentCOME(Tent):
    """Tent, with ``opinion_entropy`` in place of the entropy.

    Paper:
        Zhang et al., COME: Test-time Adaption by Conservatively Minimizing Entropy, ICLR 2025.

    Differs from the published code:
        The mass for not knowing is the number of classes; in the published code it is always 1000, which is the same
        for ImageNet. Otherwise in the same ways as Tent.

    Args:
        See ``Tent``.
    """

    in_paper = ""

    def uncertainty(self, logits: Tensor) -> Tensor:
        """Returns the opinion entropy (B,) of logits (B, C)."""
        return opinion_entropy(logits)


class EATACOME(EATA):
    """EATA, with ``opinion_entropy`` in place of the entropy, also to select and weight answers.

    Paper:
        Zhang et al., COME: Test-time Adaption by Conservatively Minimizing Entropy, ICLR 2025.

    Differs from the published code:
        In the same ways as TentCOME and EATA.

    Args:
        See ``EATA``.
    """

    def uncertainty(self, logits: Tensor) -> Tensor:
        """Returns the opinion entropy (B,) of logits (B, C)."""
        return opinion_entropy(logits)


class SARCOME(SAR):
    """SAR, with ``opinion_entropy`` in place of the entropy, also to select answers.

    Paper:
        Zhang et al., COME: Test-time Adaption by Conservatively Minimizing Entropy, ICLR 2025.

    Differs from the published code:
        In the same ways as TentCOME and SAR.

    Args:
        See ``SAR``.
    """

    def uncertainty(self, logits: Tensor) -> Tensor:
        """Returns the opinion entropy (B,) of logits (B, C)."""
        return opinion_entropy(logits)
