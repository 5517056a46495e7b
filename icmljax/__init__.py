"""ICML 2024 methods as composable JAX parts."""

__version__ = "0.1.0"
