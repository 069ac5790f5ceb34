"""Every training algorithm by name."""

from __future__ import annotations

from adanpc.train.adversarial import CDANN, DANN
from adanpc.train.algorithm import Algorithm
from adanpc.train.alignment import CORAL, MMD
from adanpc.train.erm import ERM
from adanpc.train.features import MTL, RSC, SagNet
from adanpc.train.gradients import MLDG, Fish, Fishr
from adanpc.train.inputs import ARM, Mixup
from adanpc.train.neighbors import KNN
from adanpc.train.risks import IRM, GroupDRO, VREx
from adanpc.train.rotation import Rotation

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
