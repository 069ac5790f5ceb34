"""Every refusal of this library is one of these; the message names the value and the remedy."""


class AdaNPCError(ValueError):
    """A value that cannot be used."""


class UnavailableError(AdaNPCError):
    """Something outside is missing, damaged or not as it was, and may be there another time: data, weights, a run."""


class FeatureError(AdaNPCError):
    """Features that cannot be stored or searched: wrong shape, NaN, infinite, or zero."""


class LabelError(AdaNPCError):
    """A label outside the bank's classes, or columns that do not fit the features."""


class EmptyBankError(AdaNPCError):
    """No row may vote."""


class RowError(AdaNPCError):
    """An id that names no row of the bank."""
