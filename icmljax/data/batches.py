"""Batches as pure functions of their index, so that every run can be resumed exactly."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]


class BatchIterator:
    """Endless iterator over `make_batch(0), make_batch(1), ...` whose state is one index.

    Args:
      make_batch: pure function of the batch index (>= 0) that returns the rows of this process.
      fingerprint: names the data, its order and its batch size; a saved state is only accepted by
        an iterator with the same fingerprint.
    """

    def __init__(self, make_batch: Callable[[int], Batch], *, fingerprint: str):
        self._make_batch = make_batch
        self._fingerprint = fingerprint
        self._index = 0

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        batch = self._make_batch(self._index)
        self._index += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Returns `{"index": batches drawn so far, "fingerprint": ...}`, which JSON can hold."""
        return {"index": self._index, "fingerprint": self._fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken: the next batch is `make_batch(state["index"])`.

        Raises:
          ValueError: the state belongs to other data or to another batch size, order or seed.
        """
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"the saved data state belongs to {state['fingerprint']!r}, but this iterator reads"
                f" {self._fingerprint!r}; resume with the same data, batch size and seed"
            )
        self._index = int(state["index"])


def random_generator(seed: int, *counter: int) -> np.random.Generator:
    """Returns the generator number `counter` of a seed: random access instead of a stream.

    Args:
      seed: >= 0.
      *counter: up to three numbers >= 0, for example an epoch or a batch index.

    Raises:
      ValueError: the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    # Drawing counts up the lowest word; the numbers go into the others, so streams never overlap.
    words = np.array([0, *counter, *[0] * (3 - len(counter))], np.uint64)
    return np.random.Generator(np.random.Philox(key=seed, counter=words))


def shuffled_indices(num_examples: int, batch_size: int, seed: int) -> Callable[[int], np.ndarray]:
    """Returns a function that maps a batch index to the example indices of that batch.

    Every epoch is a new permutation of the examples; the last `num_examples % batch_size` of each
    are dropped. Any batch costs O(num_examples) at most; neighbours share the cached permutation.

    Args:
      num_examples: size of the data set.
      batch_size: 1 .. num_examples.
      seed: >= 0.

    Raises:
      ValueError: a size or the seed is out of range.
    """
    if not 1 <= batch_size <= num_examples:
        raise ValueError(
            f"batch_size must lie in 1 .. {num_examples} (the number of examples), got {batch_size}"
        )
    random_generator(seed)  # a bad seed is reported here and not at the first batch
    batches_per_epoch = num_examples // batch_size
    cached: tuple[int, np.ndarray] | None = None

    def indices(index: int) -> np.ndarray:
        nonlocal cached
        epoch, batch = divmod(index, batches_per_epoch)
        current = cached  # one read: another thread may replace it at any time
        if current is None or current[0] != epoch:
            cached = current = epoch, random_generator(seed, epoch).permutation(num_examples)
        return current[1][batch * batch_size : (batch + 1) * batch_size]

    return indices
