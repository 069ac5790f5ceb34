"""Every refusal of this library is one of these; the message names the value and the remedy.

``code`` is a stable, machine-readable name of the cause: messages may be reworded, codes are not.
"""

from __future__ import annotations

from typing import ClassVar


class AdaNPCError(ValueError):
    """A value that cannot be used."""

    code: ClassVar[str] = "invalid-value"


class ArgumentError(AdaNPCError, TypeError):
    """An argument whose name is unknown."""

    code = "unknown-argument"


class UnavailableError(AdaNPCError):
    """Something outside the library is missing, damaged or changed, and may be available later: data, weights, runs."""

    code = "unavailable"


class FeatureError(AdaNPCError):
    """Features that cannot be stored or searched: wrong shape, NaN, infinite, or zero."""

    code = "bad-features"


class LabelError(AdaNPCError):
    """A label outside the bank's classes, or columns that do not fit the features."""

    code = "bad-labels"


class EmptyBankError(AdaNPCError):
    """No row may vote."""

    code = "empty-bank"


class RowError(AdaNPCError):
    """An id that names no row of the bank."""

    code = "unknown-row"


class ChangeError(AdaNPCError):
    """Something that is not a change, a change that cannot be carried out, or bytes that do not hold one."""

    code = "bad-change"
