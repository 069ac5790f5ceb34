"""Contract checks to run on your own classes and settings.

Each raises an AssertionError that says in one sentence which promise is broken.

* ``check_replay(make_classifier)``: replaying a classifier's changes gives the same classifier.
* ``check_index(make_index)``: an index is exact, and changing it leaves older ones alone.
* ``check_log(create, reopen)``: a log returns what was appended to it.
* ``check_adapter(MyAdapter)``: a test-time method keeps its promises.
* ``check_algorithm(MyAlgorithm)``: a training algorithm keeps its promises.
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
