"""Data sets as labelled domains."""

from adanpc.data.digits import rotated_digits
from adanpc.data.domain import DataError, DataSet, Domain, Images, split
from adanpc.data.images import ImageFiles, unreadable, without
from adanpc.data.read import READERS, Reader, read

__all__ = [
    "READERS", "DataError", "DataSet", "Domain", "ImageFiles", "Images", "Reader", "read", "rotated_digits", "split",
    "unreadable", "without",
]  # fmt: skip
