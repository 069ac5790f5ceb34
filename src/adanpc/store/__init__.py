"""The bank on disk: one file, written whole or not at all, checked when it is read."""

from adanpc.store.check import BankFileError
from adanpc.store.file import load, save

__all__ = ["BankFileError", "load", "save"]
