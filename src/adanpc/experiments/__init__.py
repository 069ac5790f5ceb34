"""Experiments: each returns its numbers as a value, and draws them as a figure."""
