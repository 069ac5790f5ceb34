"""Contract checks that are shipped: run them on a class of your own.

``check_algorithm(MyAlgorithm)`` and ``check_adapter(MyAdapter)`` raise AssertionError with a sentence that says what
does not hold.
"""

from adanpc.testing.adapters import ADAPTER_CHECKS, check_adapter
from adanpc.testing.algorithms import ALGORITHM_CHECKS, check_algorithm

__all__ = ["ADAPTER_CHECKS", "ALGORITHM_CHECKS", "check_adapter", "check_algorithm"]
