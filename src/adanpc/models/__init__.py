"""Encoders by name, source models, and any model wrapped as one."""

from adanpc.models.augmentation import Augmented
from adanpc.models.encoders import ENCODERS, build
from adanpc.models.preprocessing import Preprocessing
from adanpc.models.source import SourceModel
from adanpc.models.weights import WeightsError
from adanpc.models.wrap import RecipeError, Wrapped, wrap

__all__ = [
    "ENCODERS", "Augmented", "Preprocessing", "RecipeError", "SourceModel", "WeightsError", "Wrapped", "build", "wrap",
]  # fmt: skip
