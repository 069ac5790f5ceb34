"""Test-time adaptation: every method behind one interface that never sees a label."""

from adanpc.lab.adapt.adapter import Adapter, BatchError, Source
from adanpc.lab.adapt.registry import ADAPTERS, MethodError, find

__all__ = ["ADAPTERS", "Adapter", "BatchError", "MethodError", "Source", "find"]
