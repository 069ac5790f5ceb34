"""Pieces of work, their records, and how they are spread over cores and machines."""
