"""Every training algorithm by name, and algorithms of your own by module or file."""

from __future__ import annotations

from typing import Any

from adanpc.errors import AdaNPCError
from adanpc.lab.own import ALGORITHMS as ENTRY_POINTS
from adanpc.lab.own import absolute_name, is_own, own_class, registered_class, registered_names
from adanpc.lab.train.adversarial import CDANN, DANN
from adanpc.lab.train.algorithm import Algorithm
from adanpc.lab.train.alignment import CORAL, MMD
from adanpc.lab.train.erm import ERM
from adanpc.lab.train.features import MTL, RSC, SagNet
from adanpc.lab.train.gradients import MLDG, Fish, Fishr
from adanpc.lab.train.inputs import ARM, Mixup
from adanpc.lab.train.neighbors import KNN
from adanpc.lab.train.risks import IRM, GroupDRO, VREx
from adanpc.lab.train.rotation import Rotation
from adanpc.require import unknown

ALGORITHMS: dict[str, type[Algorithm]] = {
    "erm": ERM,
    "knn": KNN,
    "irm": IRM,
    "group-dro": GroupDRO,
    "mixup": Mixup,
    "mldg": MLDG,
    "coral": CORAL,
    "mmd": MMD,
    "dann": DANN,
    "cdann": CDANN,
    "mtl": MTL,
    "sag-net": SagNet,
    "arm": ARM,
    "vrex": VREx,
    "rsc": RSC,
    "fish": Fish,
    "fishr": Fishr,
    "rotation": Rotation,
}

_loaded: dict[str, type[Algorithm]] = {}  # own classes that ``find`` has loaded in this process, by absolute name


class AlgorithmError(AdaNPCError):
    """The name of a training algorithm that does not exist, or of something that is not a training algorithm."""

    code = "unknown-algorithm"


class UntrustedAlgorithmError(AlgorithmError):
    """A class of your own that a file names, but that this process has not loaded by ``find``."""

    code = "untrusted-algorithm"


def find(name: str) -> type[Algorithm]:
    """Returns the class of a training algorithm; from then on, runs of it can be opened in this process.

    Args:
        name: one of ``ALGORITHMS``; a name that an installed package registers as an entry point
            ``adanpc.algorithms``; or a class of your own, as ``my_module:MyAlgorithm`` from any module that Python can
            import from the current folder, or as ``path/to/file.py:MyAlgorithm``. The code of that module is executed,
            so do not take the name from a file that you do not trust.
    """
    if isinstance(name, str) and is_own(name):
        kind: type[Algorithm] = own_class(name, Algorithm, "training algorithm", AlgorithmError)
        _loaded[absolute_name(name)] = kind
        return kind
    return _registered(name)


def known(name: Any) -> type[Algorithm]:
    """Returns the class of a training algorithm without executing code of your own: for names read from a file.

    Args:
        name: one of ``ALGORITHMS``, a name that an installed package registers, or one that ``find`` has loaded in this
            process.
    """
    if not isinstance(name, str) or not is_own(name):
        return _registered(name)
    if absolute_name(name) not in _loaded:
        raise UntrustedAlgorithmError(
            f"the algorithm {name!r} is not part of adanpc, and a file does not decide which code is executed: "
            f"if you trust it, call adanpc.lab.train.find({name!r}) first"
        )
    return _loaded[absolute_name(name)]


def _registered(name: Any) -> type[Algorithm]:
    """Returns the class of an algorithm of this library, or of one that an installed package registers."""
    if isinstance(name, str):
        if name in ALGORITHMS:
            return ALGORITHMS[name]
        registered = registered_class(ENTRY_POINTS, name, Algorithm, "training algorithm", AlgorithmError)
        if registered is not None:
            return registered
    names = (*ALGORITHMS, *registered_names(ENTRY_POINTS))
    raise AlgorithmError(unknown("algorithm", name, names, also="module:Class"))
