"""Data sets as labelled domains."""

from adanpc.data.digits import Domain, rotated_digits

__all__ = ["Domain", "rotated_digits"]
