"""The propositions of the paper: bounds, simulations beside them, and what follows for a bank."""
