"""The list of experiments. It is data only: importing a script would define its flags."""

from typing import NamedTuple


class Entry(NamedTuple):
    """One experiment."""

    name: str  # the script is experiments/NAME.py, or the package experiments/NAME
    method: str
    paper: str
    summary: str


CATALOGUE = (
    Entry(
        name="mada",
        method="icmljax.optimizers.mada",
        paper="Ozkara et al., ICML 2024, arXiv 2401.08893",
        summary="an optimizer that learns its own coefficients, against Adam, Lion, Yogi, Adan",
    ),
    Entry(
        name="eoi",
        method="icmljax.initializers.eoi",
        paper="Nowak et al., ICML 2024, arXiv 2406.01755",
        summary="weights that are sparse and exactly orthogonal, in nets of up to 1000 layers",
    ),
    Entry(
        name="generate",
        method="icmljax.language",
        paper="Touvron et al., 2023, arXiv 2302.13971",
        summary="the Llama family that other methods build on; continues text with SmolLM2",
    ),
)
