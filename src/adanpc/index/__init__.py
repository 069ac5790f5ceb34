"""Where rows are stored and searched: unit vectors, exact nearest neighbors. Knows nothing of labels."""

from adanpc.index.exact import ExactIndex
from adanpc.index.grid import STORAGE, check_features, unit

__all__ = ["STORAGE", "ExactIndex", "check_features", "unit"]
