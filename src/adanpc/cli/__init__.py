"""The command line: one module per command, or per group of related commands."""

from adanpc.cli import adapt, bank, data, demo, info, serve, table, train
from adanpc.cli.app import app, main

__all__ = ["adapt", "app", "bank", "data", "demo", "info", "main", "serve", "table", "train"]
