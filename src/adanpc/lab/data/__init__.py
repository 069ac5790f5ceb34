"""Data sets as labeled domains."""

from adanpc.lab.data.digits import rotated_digits
from adanpc.lab.data.domain import DataError, DataSet, Domain, Images, split
from adanpc.lab.data.images import ImageFiles, unreadable, without
from adanpc.lab.data.read import READERS, Reader, find_data, read, read_images

__all__ = [
    "READERS", "DataError", "DataSet", "Domain", "ImageFiles", "Images", "Reader", "find_data", "read",
    "read_images", "rotated_digits", "split", "unreadable", "without",
]  # fmt: skip
