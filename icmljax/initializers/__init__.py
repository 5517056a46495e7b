"""Initializers in the form of `jax.nn.initializers`: functions of a key, a shape and a dtype."""
