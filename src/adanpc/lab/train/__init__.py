"""Training algorithms, and runs of them that can be interrupted."""

from adanpc.lab.train.algorithm import Algorithm, Batch
from adanpc.lab.train.registry import ALGORITHMS, AlgorithmError, find

__all__ = ["ALGORITHMS", "Algorithm", "AlgorithmError", "Batch", "find"]
