"""The optimizers: chains of transformations."""
