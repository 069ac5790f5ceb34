"""Any trained model, wrapped as the encoder of a bank."""

from adanpc.models.recipe import RecipeError
from adanpc.models.wrap import Wrapped, wrap

__all__ = ["RecipeError", "Wrapped", "wrap"]
