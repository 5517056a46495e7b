"""Tests of icmljax.data.batches."""

import json

import numpy as np
import pytest

from icmljax.data.batches import BatchIterator, random_generator, shuffled_indices


def _squares():
    return BatchIterator(lambda index: {"x": np.array([index**2])}, fingerprint="squares")


def test_iterator_counts_up_and_its_state_survives_json():
    batches = _squares()
    assert [int(next(batches)["x"][0]) for _ in range(4)] == [0, 1, 4, 9]
    state = json.loads(json.dumps(batches.state()))
    assert state == {"index": 4, "fingerprint": "squares"}
    resumed = _squares()
    resumed.restore(state)
    assert next(resumed)["x"] == next(batches)["x"] == 16
    assert iter(resumed) is resumed


def test_a_batch_that_fails_is_not_counted():
    def make_batch(index):
        raise OSError("no disk")

    batches = BatchIterator(make_batch, fingerprint="")
    with pytest.raises(OSError, match="no disk"):
        next(batches)
    assert batches.state()["index"] == 0


@pytest.mark.bad_input
def test_state_of_other_data_is_refused():
    with pytest.raises(ValueError, match="'cubes'.*'squares'.*same data"):
        _squares().restore({"index": 3, "fingerprint": "cubes"})


def test_random_generators_are_reproducible_and_do_not_overlap():
    draws = {
        counter: random_generator(7, *counter).integers(2**63, size=1000)
        for counter in [(0,), (1,), (2,), (0, 1), (1, 1), (0, 0, 1)]
    }
    np.testing.assert_array_equal(draws[1,], random_generator(7, 1).integers(2**63, size=1000))
    everything = np.concatenate([*draws.values(), random_generator(8).integers(2**63, size=1000)])
    # 7000 numbers of 63 bits: two are equal by chance with probability 3e-12.
    assert len(np.unique(everything)) == 7000


def test_every_epoch_is_another_permutation():
    indices = shuffled_indices(103, 10, seed=3)
    epochs = np.array([[indices(10 * epoch + i) for i in range(10)] for epoch in range(3)])
    assert epochs.shape == (3, 10, 10)
    for epoch in epochs:
        assert len(np.unique(epoch)) == 100
        assert epoch.min() >= 0 and epoch.max() < 103
    assert not (epochs[0] == epochs[1]).all() and not (epochs[1] == epochs[2]).all()
    # Which examples are dropped changes too.
    assert set(epochs[0].flat) != set(epochs[1].flat)


def test_shuffled_indices_can_be_read_in_any_order():
    forward = [shuffled_indices(20, 6, seed=1)(i) for i in range(9)]
    indices = shuffled_indices(20, 6, seed=1)
    for i in [8, 0, 4, 3, 5, 1, 7, 2, 6]:
        np.testing.assert_array_equal(indices(i), forward[i])
    assert not np.array_equal(forward[0], shuffled_indices(20, 6, seed=2)(0))


@pytest.mark.bad_input
def test_bad_sizes_and_seeds():
    for batch_size in (0, 11):
        with pytest.raises(ValueError, match=rf"1 \.\. 10 .*got {batch_size}"):
            shuffled_indices(10, batch_size, seed=0)
    with pytest.raises(ValueError, match="seed must be >= 0, got -1"):
        shuffled_indices(10, 5, seed=-1)
