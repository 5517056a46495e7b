"""What the tests of the initializers share: reference numbers, keys, tests of a law."""

import pathlib

import jax
import numpy as np
import scipy.stats

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "eoi"


def golden(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def keys(seed, count):
    return jax.random.split(jax.random.key(seed), count)


def orthogonality_error(weights, scale=1.0):
    """Largest element of |A A^T / scale^2 - I|, on the smaller side; batch axes in front."""
    a = np.asarray(weights, np.float64) / scale
    gram = a @ a.swapaxes(-1, -2) if a.shape[-2] <= a.shape[-1] else a.swapaxes(-1, -2) @ a
    return np.abs(gram - np.eye(gram.shape[-1])).max()


def fits(observed, probabilities, fewest=5):
    """p-value of chi-square; cells that expect fewer than five are put together from both ends."""
    observed, expected = np.asarray(observed, float), np.asarray(probabilities, float)
    expected = expected * observed.sum()
    cells, cell = [], np.zeros(2)
    for pair in np.stack([observed, expected], axis=1):
        cell = cell + pair
        if cell[1] >= fewest:
            cells.append(cell)
            cell = np.zeros(2)
    cells[-1] = cells[-1] + cell
    observed, expected = np.array(cells).T
    return scipy.stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue
