"""The command line: one module for each command."""

from adanpc.cli import adapt, data, demo, table, train
from adanpc.cli.app import app, main

__all__ = ["adapt", "app", "data", "demo", "main", "table", "train"]
