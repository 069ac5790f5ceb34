"""Any trained model, wrapped as the encoder of a bank."""

from adanpc.models.inputs import InputError
from adanpc.models.loading import LoaderError
from adanpc.models.recipe import RecipeError
from adanpc.models.wrap import Wrapped, wrap

__all__ = ["InputError", "LoaderError", "RecipeError", "Wrapped", "wrap"]
