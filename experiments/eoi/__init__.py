"""Exact Orthogonal Initialization against its baselines."""
