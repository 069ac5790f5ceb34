"""Encoders by name, and source models built on them."""

from adanpc.lab.networks.augmentation import Augmented
from adanpc.lab.networks.encoders import ENCODERS, EncoderError, build, find_encoder
from adanpc.lab.networks.preprocessing import Preprocessing
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.networks.weights import WeightsError

__all__ = [
    "ENCODERS", "Augmented", "EncoderError", "Preprocessing", "SourceModel", "WeightsError", "build", "find_encoder",
]  # fmt: skip
