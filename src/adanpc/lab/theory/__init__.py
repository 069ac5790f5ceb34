"""The propositions of the paper: their bounds, simulations that test them, and what they say about a bank."""
