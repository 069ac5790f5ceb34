"""Training a source model."""

from adanpc.train.losses import KNNLoss

__all__ = ["KNNLoss"]
