"""Where rows are stored and searched: unit vectors, exact nearest neighbors. Knows nothing of labels."""

from adanpc.index.exact import ExactIndex
from adanpc.index.grid import STORAGE, check_features, unit
from adanpc.index.protocol import Found, Index

__all__ = ["STORAGE", "ExactIndex", "Found", "Index", "check_features", "unit"]
