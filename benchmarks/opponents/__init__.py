"""Optimizers that Adapprox is compared with and that Optax lacks."""
