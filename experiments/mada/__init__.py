"""MADA's experiment: ``python -m experiments.mada`` (see ``__main__.py``)."""
