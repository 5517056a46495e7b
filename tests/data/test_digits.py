"""Tests of icmljax.data.digits."""

import sys

import numpy as np
import pytest

from icmljax.data.digits import load_digits


def test_split_holds_every_digit_once():
    from sklearn import datasets

    digits = load_digits()
    assert digits.train_images.shape == (1297, 64) and digits.test_images.shape == (500, 64)
    assert digits.train_images.dtype == digits.test_images.dtype == np.float32
    assert digits.train_labels.dtype == digits.test_labels.dtype == np.int32
    images = np.concatenate([digits.train_images, digits.test_images])
    labels = np.concatenate([digits.train_labels, digits.test_labels])
    assert images.min() == 0 and images.max() == 1
    rows = np.column_stack([images * 16, labels])
    original = np.column_stack(datasets.load_digits(return_X_y=True))
    np.testing.assert_array_equal(rows[np.lexsort(rows.T)], original[np.lexsort(original.T)])
    # Shuffled: every class has its share of the test set (50 +- 6 by chance).
    assert np.bincount(digits.test_labels, minlength=10).min() > 20


def test_split_depends_on_the_seed_alone():
    np.testing.assert_array_equal(load_digits(1).test_images, load_digits(1).test_images)
    assert not np.array_equal(load_digits(1).test_images, load_digits(2).test_images)


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'icmljax\[experiments\]'"):
        load_digits()
