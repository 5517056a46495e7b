"""Scikit-learn's 8 x 8 handwritten digits, which come with the package."""

from typing import NamedTuple

import numpy as np

from icmljax.data.batches import random_generator


class Digits(NamedTuple):
    """The digits, split at random into 1297 for training and 500 for testing.

    Attributes:
      train_images: float32 of shape (1297, 64), in [0, 1].
      train_labels: int32 of shape (1297,), in 0 .. 9.
      test_images: float32 of shape (500, 64), in [0, 1].
      test_labels: int32 of shape (500,), in 0 .. 9.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_digits(seed: int = 0) -> Digits:
    """Returns the digits with a split that depends on the seed alone.

    Args:
      seed: >= 0.

    Raises:
      ImportError: scikit-learn is not installed.
      ValueError: the seed is negative.

    Reference:
      E. Alpaydin and C. Kaynak, "Optical recognition of handwritten digits", UCI (1998).
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn, which is missing: pip install"
            " 'icmljax[experiments]'"
        ) from error
    images, labels = datasets.load_digits(return_X_y=True)
    order = random_generator(seed).permutation(len(images))
    images = (images[order] / 16).astype(np.float32)
    labels = labels[order].astype(np.int32)
    return Digits(images[:-500], labels[:-500], images[-500:], labels[-500:])
