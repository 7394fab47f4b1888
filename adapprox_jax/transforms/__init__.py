"""Optax transformations: from a tree of updates and a state to a tree and a state."""
