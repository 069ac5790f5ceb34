"""Contract checks that are shipped: run them on a class, or on settings, of your own.

Each raises AssertionError with a sentence that says what does not hold.

* ``check_replay(make_classifier)``: changes are the whole truth about a classifier.
* ``check_index(make_index)``: an index is exact, and changing it leaves older ones alone.
* ``check_log(create, reopen)``: a log gives back what it was given.
* ``check_adapter(MyAdapter)``: a test-time method keeps its promises.
* ``check_algorithm(MyAlgorithm)``: so does a training algorithm.
"""

from adanpc.testing.adapters import ADAPTER_CHECKS, check_adapter
from adanpc.testing.algorithms import ALGORITHM_CHECKS, check_algorithm
from adanpc.testing.indexes import check_index
from adanpc.testing.logs import check_log
from adanpc.testing.replay import check_replay

__all__ = [
    "ADAPTER_CHECKS", "ALGORITHM_CHECKS", "check_adapter", "check_algorithm", "check_index", "check_log",
    "check_replay",
]  # fmt: skip
