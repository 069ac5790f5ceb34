"""Names that the command line completes and shows in its help.

They are repeated here because the modules that define them import torch, which takes seconds, and completion must
answer at once. A test compares them with the registries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

DATA_SETS = (
    "rotated-mnist", "pacs", "vlcs", "terra-incognita", "domain-net", "office-home", "folder", "manifest",
    "cifar-10", "cifar-10-c", "imagenet", "imagenet-c",
)  # fmt: skip
ALGORITHMS = (
    "erm", "knn", "irm", "group-dro", "mixup", "mldg", "coral", "mmd", "dann", "cdann", "mtl", "sag-net", "arm",
    "vrex", "rsc", "fish", "fishr", "rotation",
)  # fmt: skip
ENCODERS = (
    "convnet", "cifar-resnet-20", "cifar-resnet-56", "wrn-40-2", "wrn-28-10", "resnet-18", "resnet-50", "vit-b16",
    "vit-l16", "deit-s16", "deit-b16", "bit-resnet-50", "mixer-b16", "mixer-l16", "efficientnet-lite0",
    "efficientnet-lite1", "efficientnet-lite2",
)  # fmt: skip
METHODS = (
    "source", "knn", "adanpc", "adanpc-safe", "adanpc-published", "adanpc-bn", "adanpc-bn-published", "adanpc-tent",
    "adanpc-eta", "adanpc-reset", "adanpc-asr", "adanpc-petta", "t3a", "t3a-published", "tast", "lame", "zero-shot",
    "tda", "tda-published", "boost-adapter", "boost-adapter-published", "dmn-zs", "oga", "oga-published", "stat-a",
    "neo", "bn-adapt", "tent", "tent-clf", "tent-prebn", "pl-clf", "pl-full", "shot", "shot-im", "eta", "eata",
    "sar", "sar-published", "deyo", "deyo-published", "tent-come", "eata-come", "sar-come", "rdumb", "asr", "rpl",
    "cotta", "roid", "roid-published", "cmf", "cmf-published", "note", "rotta", "petta", "ttaug", "memo", "ttt",
    "ttt-online",
)  # fmt: skip
STREAMS = (
    "iid", "successive", "mixed", "recurring", "gradual", "label_shift", "correlated", "sorted", "one_class",
)  # fmt: skip
TABLES = (
    "ood", "ood-rotated-mnist", "ood-vlcs", "ood-pacs", "ood-domain-net", "ood-terra-incognita", "backbones",
    "loss-pacs", "loss-rotated-mnist", "convergence", "frozen-pacs", "k-pacs", "share-pacs", "frozen-rotated-mnist",
    "k-rotated-mnist", "share-rotated-mnist", "adaptation", "adaptation-rotated-mnist", "adaptation-pacs",
    "adaptation-vlcs", "adaptation-domain-net", "successive-rotated-mnist", "successive-vlcs", "successive-pacs",
    "successive-terra-incognita", "successive-domain-net", "inference-time", "cifar-10-c-5", "cifar-10-c-1",
    "imagenet-c", "gallery-pacs", "gallery-rotated-mnist", "theory", "split", "safety",
)  # fmt: skip
SCALES = ("full", "large", "medium", "small", "tiny", "least")
PRESETS = ("paper", "safe")
STEPS = 5000
DEMO_SEED = 0
DEMO_EPOCHS = 20


def completing(names: Sequence[str]) -> Callable[[str], list[str]]:
    """A completion function for typer: it returns the names that begin with what has been typed."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete
