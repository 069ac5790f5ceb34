"""Crashes of a durable bank: kills, power cuts and flipped bytes, and what is left of the bank after each.

``python -m benchmarks.crashes`` runs all of them; tests/attacks/test_crashes.py runs a few of each.
"""
