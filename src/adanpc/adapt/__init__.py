"""Test-time adaptation: every method behind one interface that never sees a label."""

from adanpc.adapt.adapter import Adapter, BatchError, Source
from adanpc.adapt.registry import ADAPTERS

__all__ = ["ADAPTERS", "Adapter", "BatchError", "Source"]
