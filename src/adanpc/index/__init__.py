"""Where rows are stored and searched: unit vectors, exact nearest neighbors. Knows nothing of labels."""

from adanpc.index.exact import ExactIndex
from adanpc.index.faiss import ApproximateIndex
from adanpc.index.grid import STORAGE, check_features, unit
from adanpc.index.protocol import Found, Index, Wanted

__all__ = ["STORAGE", "ApproximateIndex", "ExactIndex", "Found", "Index", "Wanted", "check_features", "unit"]
