"""Optimizers: optax transformations, one module per method."""
