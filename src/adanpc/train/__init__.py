"""Training a source model."""

from adanpc.train.algorithm import Algorithm, Batch
from adanpc.train.losses import KNNLoss
from adanpc.train.registry import ALGORITHMS

__all__ = ["ALGORITHMS", "Algorithm", "Batch", "KNNLoss"]
