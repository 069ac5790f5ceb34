"""The errors that this library raises. Their messages name the value and the remedy.

``code`` is a stable, machine-readable name of the cause: messages may be reworded, codes will not be.
"""

from __future__ import annotations

from typing import ClassVar


class AdaNPCError(ValueError):
    """Raised for a value that cannot be used; the base class of all errors of this library."""

    code: ClassVar[str] = "invalid-value"


class ArgumentError(AdaNPCError, TypeError):
    """Raised for an argument whose name is unknown."""

    code = "unknown-argument"


class UnavailableError(AdaNPCError):
    """Raised if data, weights, runs or libraries are missing, damaged or changed; they may be available later."""

    code = "unavailable"


class FeatureError(AdaNPCError):
    """Raised for features that cannot be stored or searched: of a wrong shape, NaN, infinite or zero."""

    code = "bad-features"


class LabelError(AdaNPCError):
    """Raised for labels outside the bank's classes, and for labels, domains or keys that do not fit the features."""

    code = "bad-labels"


class EmptyBankError(AdaNPCError):
    """Raised if no row may vote."""

    code = "empty-bank"


class RowError(AdaNPCError):
    """Raised for an id that no row of the bank has."""

    code = "unknown-row"


class ChangeError(AdaNPCError):
    """Raised for a change that cannot be carried out, something that is not a change, or bytes that do not hold one."""

    code = "bad-change"
