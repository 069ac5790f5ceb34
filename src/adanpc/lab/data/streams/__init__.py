"""How test samples arrive: in which order, in which batches, and where a method is reset."""

from __future__ import annotations

from collections.abc import Mapping

from adanpc.lab.data.streams.classes import Correlated, LabelShift, OneClass, Sorted
from adanpc.lab.data.streams.domains import Gradual, Iid, Mixed, Recurring, Successive
from adanpc.lab.data.streams.stream import Arrival, Stream, fetch, labels_of

__all__ = [
    "STREAMS",
    "Arrival",
    "Correlated",
    "Gradual",
    "Iid",
    "LabelShift",
    "Mixed",
    "OneClass",
    "Recurring",
    "Sorted",
    "Stream",
    "Successive",
    "fetch",
    "labels_of",
]

STREAMS: Mapping[str, type[Stream]] = {
    "iid": Iid,
    "successive": Successive,
    "mixed": Mixed,
    "recurring": Recurring,
    "gradual": Gradual,
    "label_shift": LabelShift,
    "correlated": Correlated,
    "sorted": Sorted,
    "one_class": OneClass,
}
