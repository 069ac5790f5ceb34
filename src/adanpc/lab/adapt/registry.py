"""Every test-time method by name, and methods of your own by module or file."""

from __future__ import annotations

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter
from adanpc.lab.adapt.bank import AdaNPC, AdaNPCPublished, AdaNPCSafe
from adanpc.lab.adapt.caches import DMN, TDA, BoostAdapter, BoostAdapterPublished, TDAPublished
from adanpc.lab.adapt.cmf import CMF, CMFPublished
from adanpc.lab.adapt.combined import AdaNPCETA, AdaNPCTent
from adanpc.lab.adapt.come import EATACOME, SARCOME, TentCOME
from adanpc.lab.adapt.filtered import EATA, ETA
from adanpc.lab.adapt.fixed import LAME, FrozenKNN, Linear
from adanpc.lab.adapt.gaussians import OGA, OGAPublished, StatA
from adanpc.lab.adapt.memory import NOTE, RoTTA
from adanpc.lab.adapt.petta import PeTTA
from adanpc.lab.adapt.prototypes import T3A, T3APublished
from adanpc.lab.adapt.pseudo import SHOT, SHOTIM, PLClf, PLFull
from adanpc.lab.adapt.reliable import SAR, DeYO, DeYOPublished, SARPublished
from adanpc.lab.adapt.resetting import ASR, RDumb
from adanpc.lab.adapt.retrained import AdaNPCBN, AdaNPCBNPublished
from adanpc.lab.adapt.returning import AdaNPCASR, AdaNPCPeTTA, AdaNPCReset
from adanpc.lab.adapt.robust_labels import RPL
from adanpc.lab.adapt.roid import ROID, ROIDPublished
from adanpc.lab.adapt.rotation import TTT, TTTOnline
from adanpc.lab.adapt.statistics import NEO, BNAdapt
from adanpc.lab.adapt.tast import TAST
from adanpc.lab.adapt.teacher import CoTTA
from adanpc.lab.adapt.tent import Tent, TentClf, TentPreBN
from adanpc.lab.adapt.views import MEMO, TTAug
from adanpc.lab.adapt.zero_shot import ZeroShot
from adanpc.lab.own import METHODS as ENTRY_POINTS
from adanpc.lab.own import absolute_name, is_own, own_class, registered_class, registered_names
from adanpc.require import unknown

ADAPTERS: dict[str, type[Adapter]] = {
    "source": Linear,
    "knn": FrozenKNN,
    "adanpc": AdaNPC,
    "adanpc-safe": AdaNPCSafe,
    "adanpc-published": AdaNPCPublished,
    "adanpc-bn": AdaNPCBN,
    "adanpc-bn-published": AdaNPCBNPublished,
    "adanpc-tent": AdaNPCTent,
    "adanpc-eta": AdaNPCETA,
    "adanpc-reset": AdaNPCReset,
    "adanpc-asr": AdaNPCASR,
    "adanpc-petta": AdaNPCPeTTA,
    "t3a": T3A,
    "t3a-published": T3APublished,
    "tast": TAST,
    "lame": LAME,
    "zero-shot": ZeroShot,
    "tda": TDA,
    "tda-published": TDAPublished,
    "boost-adapter": BoostAdapter,
    "boost-adapter-published": BoostAdapterPublished,
    "dmn-zs": DMN,
    "oga": OGA,
    "oga-published": OGAPublished,
    "stat-a": StatA,
    "neo": NEO,
    "bn-adapt": BNAdapt,
    "tent": Tent,
    "tent-clf": TentClf,
    "tent-prebn": TentPreBN,
    "pl-clf": PLClf,
    "pl-full": PLFull,
    "shot": SHOT,
    "shot-im": SHOTIM,
    "eta": ETA,
    "eata": EATA,
    "sar": SAR,
    "sar-published": SARPublished,
    "deyo": DeYO,
    "deyo-published": DeYOPublished,
    "tent-come": TentCOME,
    "eata-come": EATACOME,
    "sar-come": SARCOME,
    "rdumb": RDumb,
    "asr": ASR,
    "rpl": RPL,
    "cotta": CoTTA,
    "roid": ROID,
    "roid-published": ROIDPublished,
    "cmf": CMF,
    "cmf-published": CMFPublished,
    "note": NOTE,
    "rotta": RoTTA,
    "petta": PeTTA,
    "ttaug": TTAug,
    "memo": MEMO,
    "ttt": TTT,
    "ttt-online": TTTOnline,
}


_loaded: set[str] = set()  # the absolute names of own methods that ``find`` has loaded in this process


class MethodError(AdaNPCError):
    """The name of a test-time method that does not exist, or of something that is not a test-time method."""

    code = "unknown-method"


def find(name: str) -> type[Adapter]:
    """Returns the class of a test-time method.

    Args:
        name: one of ``ADAPTERS``; a name that an installed package registers as an entry point ``adanpc.methods``; or a
            class of your own, as ``my_module:MyMethod`` from any module that Python can import from the current folder,
            or as ``path/to/file.py:MyMethod``.
    """
    if is_own(name):
        kind: type[Adapter] = own_class(name, Adapter, "test-time method", MethodError)
        _loaded.add(absolute_name(name))
        return kind
    if name in ADAPTERS:
        return ADAPTERS[name]
    registered = registered_class(ENTRY_POINTS, name, Adapter, "test-time method", MethodError)
    if registered is None:
        names = (*ADAPTERS, *registered_names(ENTRY_POINTS))
        raise MethodError(unknown("method", name, names, also="module:Class"))
    return registered


def is_named(name: str) -> bool:
    """Returns whether ``find`` would run no new code for a name, which may come from a file that someone else wrote.

    That is so if the name is not one of your own, or if ``find`` has loaded it before.
    """
    return not is_own(name) or absolute_name(name) in _loaded
