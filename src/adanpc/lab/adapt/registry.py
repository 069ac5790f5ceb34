"""Every test-time method by name."""

from __future__ import annotations

from adanpc.lab.adapt.adapter import Adapter
from adanpc.lab.adapt.bank import AdaNPC, AdaNPCPublished
from adanpc.lab.adapt.combined import AdaNPCETA, AdaNPCTent
from adanpc.lab.adapt.filtered import EATA, ETA
from adanpc.lab.adapt.fixed import LAME, FrozenKNN, Linear
from adanpc.lab.adapt.memory import NOTE, RoTTA
from adanpc.lab.adapt.prototypes import T3A, T3APublished
from adanpc.lab.adapt.pseudo import SHOT, SHOTIM, PLClf, PLFull
from adanpc.lab.adapt.reliable import SAR, DeYO
from adanpc.lab.adapt.retrained import AdaNPCBN, AdaNPCBNPublished
from adanpc.lab.adapt.roid import ROID
from adanpc.lab.adapt.rotation import TTT, TTTOnline
from adanpc.lab.adapt.statistics import NEO, BNAdapt
from adanpc.lab.adapt.tast import TAST
from adanpc.lab.adapt.teacher import CoTTA
from adanpc.lab.adapt.tent import Tent, TentClf, TentPreBN
from adanpc.lab.adapt.views import MEMO, TTAug

ADAPTERS: dict[str, type[Adapter]] = {
    "source": Linear,
    "knn": FrozenKNN,
    "adanpc": AdaNPC,
    "adanpc-published": AdaNPCPublished,
    "adanpc-bn": AdaNPCBN,
    "adanpc-bn-published": AdaNPCBNPublished,
    "adanpc-tent": AdaNPCTent,
    "adanpc-eta": AdaNPCETA,
    "t3a": T3A,
    "t3a-published": T3APublished,
    "tast": TAST,
    "lame": LAME,
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
    "deyo": DeYO,
    "cotta": CoTTA,
    "roid": ROID,
    "note": NOTE,
    "rotta": RoTTA,
    "ttaug": TTAug,
    "memo": MEMO,
    "ttt": TTT,
    "ttt-online": TTTOnline,
}
