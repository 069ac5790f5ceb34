"""Every training algorithm by name."""

from __future__ import annotations

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
