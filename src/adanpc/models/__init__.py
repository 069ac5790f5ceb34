"""Encoders, and any model wrapped as one."""

from adanpc.models.wrap import RecipeError, Wrapped, wrap

__all__ = ["RecipeError", "Wrapped", "wrap"]
