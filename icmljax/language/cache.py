"""Key-value caches behind one protocol; generation and speculative sampling use nothing else.

A cache is a pytree. It holds what the attention of all layers needs of the tokens seen so far, in a
layout that only the cache knows, and does the attention itself: it gets queries and keys *before*
their rotary positions. Adding tokens is a transaction of three parts, which
`icmljax.language.llama.extend` runs:

    cache, granted = cache.reserve(counts)                            once
    mixed, cache = cache.attend(layer, query, key, value, granted)    in every layer
    cache = cache.advance(granted)                                    once

Rows are independent, and may hold different numbers of tokens. `DenseCache` sets memory aside for
the longest row in all rows; `PagedCache` shares a pool of pages among them.
"""

from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from icmljax.language.attention import Rope, attend


@runtime_checkable
class Cache(Protocol):
    """What a model and a sampler may know of a cache.

    All methods but `grow` and `bytes` are pure functions that work under `jit`.

    Attributes:
      lengths: tokens of each row, int32 `[batch]`; the next token's position.
      overflowed: rows that were refused tokens for lack of memory, bool `[batch]`.
      capacity: tokens that a row can hold at most.
    """

    lengths: Any
    overflowed: Any

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold at most."""

    def reserve(self, counts: Int[Array, " batch"]) -> tuple["Cache", Int[Array, " batch"]]:
        """Makes room for `counts` tokens in each row.

        Returns:
          The cache and how many tokens each row was granted: all, or none where they do not fit;
          such a row is marked in `overflowed`, keeps what it holds, and is granted nothing until
          `grow` or `rollback` makes room.
        """

    def attend(
        self,
        layer: Int[Array, ""],
        query: Float[Array, "batch time heads head_dim"],
        key: Float[Array, "batch time kv_heads head_dim"],
        value: Float[Array, "batch time kv_heads head_dim"],
        granted: Int[Array, " batch"],
    ) -> tuple[Float[Array, "batch time heads head_dim"], "Cache"]:
        """Stores the first `granted` keys and values of each row in a layer, and attends to all."""

    def advance(self, granted: Int[Array, " batch"]) -> "Cache":
        """Counts the tokens that all layers have stored."""

    def snapshot(self) -> Any:
        """Returns what `rollback` needs, to be taken before tokens are added."""

    def rollback(self, snapshot: Any, kept: Int[Array, " batch"]) -> "Cache":
        """Keeps only the first `kept` tokens, in each row, of those added since the snapshot."""

    def grow(self, capacity: int) -> "Cache":
        """Returns a copy with more memory; rows that had overflowed may go on."""

    def bytes(self) -> dict[str, int]:
        """Returns the memory in use.

        "logical" is that of the tokens held, "allocated" that of keys and values as they lie in
        memory, "state" everything else.
        """


class DenseCache(flax.struct.PyTreeNode):
    """A cache with room for `capacity` tokens in every row.

    Attributes:
      keys: at their rotary positions, `[layers, batch, capacity, kv_heads, head_dim]`.
      values: like `keys`.
      lengths: see `Cache`.
      overflowed: see `Cache`.
      rope: rotary positions.
    """

    keys: Any
    values: Any
    lengths: Any
    overflowed: Any
    rope: Rope = flax.struct.field(pytree_node=False)

    @classmethod
    def create(
        cls, config: Any, batch: int, capacity: int, dtype: DTypeLike = jnp.float32
    ) -> "DenseCache":
        """Returns an empty cache.

        Args:
          config: of the model; its layers, heads and rotary positions.
          batch: rows.
          capacity: tokens of a row.
          dtype: of keys and values.

        Raises:
          ValueError: batch or capacity below 1.
        """
        _check_sizes(batch=batch, capacity=capacity)
        shape = (config.num_layers, batch, capacity, config.num_kv_heads, config.head_dim)
        return cls(
            jnp.zeros(shape, dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros(batch, jnp.int32),
            jnp.zeros(batch, bool),
            config.rope,
        )

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold."""
        return self.keys.shape[2]

    def reserve(self, counts):
        """See `Cache.reserve`."""
        fits = self.lengths + counts <= self.capacity
        overflowed = self.overflowed | ~fits
        return self.replace(overflowed=overflowed), jnp.where(overflowed, 0, counts)

    def attend(self, layer, query, key, value, granted):
        """See `Cache.attend`."""
        time = query.shape[1]
        positions = self.lengths[:, None] + jnp.arange(time)
        stored = jnp.arange(time) < granted[:, None]
        slots = jnp.where(stored, positions, self.capacity)  # out of bounds: dropped
        rows = jnp.arange(len(self.lengths))[:, None]

        def write(pool, new):
            return pool.at[layer, rows, slots].set(new.astype(pool.dtype), mode="drop")

        keys = write(self.keys, self.rope.rotate(key, positions))
        values = write(self.values, value)
        mixed = attend(
            self.rope.rotate(query, positions),
            keys[layer].astype(query.dtype),
            values[layer].astype(query.dtype),
            _visible(positions, self.capacity),
        )
        return mixed, self.replace(keys=keys, values=values)

    def advance(self, granted):
        """See `Cache.advance`."""
        return self.replace(lengths=self.lengths + granted)

    def snapshot(self):
        """See `Cache.snapshot`."""
        return self.lengths, self.overflowed

    def rollback(self, snapshot, kept):
        """See `Cache.rollback`; what lies beyond a row's length is never seen and overwritten."""
        lengths, overflowed = snapshot
        return self.replace(
            lengths=jnp.minimum(lengths + kept, self.lengths), overflowed=overflowed
        )

    def grow(self, capacity: int):
        """See `Cache.grow`.

        Raises:
          ValueError: less than before.
        """
        more = _more(self.capacity, capacity)
        pad = ((0, 0), (0, 0), (0, more), (0, 0), (0, 0))
        return self.replace(
            keys=jnp.pad(self.keys, pad),
            values=jnp.pad(self.values, pad),
            overflowed=jnp.zeros_like(self.overflowed),
        )

    def bytes(self) -> dict[str, int]:
        """See `Cache.bytes`."""
        layers, _, _, kv_heads, head_dim = self.keys.shape
        token = 2 * layers * kv_heads * head_dim * self.keys.dtype.itemsize
        return {
            "logical": token * int(jnp.sum(self.lengths)),
            "allocated": self.keys.nbytes + self.values.nbytes,
            "state": self.lengths.nbytes + self.overflowed.nbytes,
        }


class PagedCache(flax.struct.PyTreeNode):
    """A cache whose rows take pages from one pool as they need them.

    All layers of a row use the same pages, each in its own part of the pool.

    Attributes:
      keys: at their rotary positions, `[layers, pages, page_size, kv_heads, head_dim]`.
      values: like `keys`.
      table: the pages of each row, in order, int32 `[batch, pages of a row at most]`.
      free: a stack of unused pages, int32 `[pages]`; the first `num_free` are on it.
      num_free: int32 scalar.
      lengths: see `Cache`.
      overflowed: see `Cache`.
      rope: rotary positions.

    Reference:
      W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with
      PagedAttention" (2023), section 4.
    """

    keys: Any
    values: Any
    table: Any
    free: Any
    num_free: Any
    lengths: Any
    overflowed: Any
    rope: Rope = flax.struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        config: Any,
        batch: int,
        capacity: int,
        dtype: DTypeLike = jnp.float32,
        *,
        num_pages: int | None = None,
        page_size: int = 16,
    ) -> "PagedCache":
        """Returns an empty cache.

        Args:
          config: of the model.
          batch: rows.
          capacity: tokens that one row can hold at most, rounded up to whole pages.
          dtype: of keys and values.
          num_pages: pages of the pool, shared by all rows; None: enough for all rows at once.
          page_size: tokens of a page.

        Raises:
          ValueError: a size below 1.
        """
        _check_sizes(batch=batch, capacity=capacity, page_size=page_size)
        row_pages = -(-capacity // page_size)
        num_pages = batch * row_pages if num_pages is None else num_pages
        _check_sizes(num_pages=num_pages)
        shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
        return cls(
            jnp.zeros(shape, dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros((batch, row_pages), jnp.int32),
            jnp.arange(num_pages, dtype=jnp.int32)[::-1],
            jnp.asarray(num_pages, jnp.int32),
            jnp.zeros(batch, jnp.int32),
            jnp.zeros(batch, bool),
            config.rope,
        )

    @property
    def capacity(self) -> int:
        """Tokens that one row can hold at most."""
        return self.table.shape[1] * self._page_size

    @property
    def _page_size(self) -> int:
        return self.keys.shape[2]

    def _num_pages(self, lengths):
        return (lengths + self._page_size - 1) // self._page_size

    def reserve(self, counts):
        """See `Cache.reserve`; rows are served in order while pages last."""
        held = self._num_pages(self.lengths)
        wanted = self._num_pages(self.lengths + counts) - held
        may = ~self.overflowed & (self.lengths + counts <= self.capacity)

        def serve(left, row):
            wanted, may = row
            served = may & (wanted <= left)
            return left - jnp.where(served, wanted, 0), served

        num_free, served = jax.lax.scan(serve, self.num_free, (wanted, may))
        granted = jnp.where(served, counts, 0)
        taken = jnp.where(served, wanted, 0)
        # The n-th page that all rows take together is the n-th from the top of the stack.
        before = jnp.cumsum(taken) - taken
        column = jnp.arange(self.table.shape[1]) - held[:, None]
        new = (column >= 0) & (column < taken[:, None])
        page = self.free[jnp.clip(self.num_free - 1 - before[:, None] - column, 0)]
        cache = self.replace(
            table=jnp.where(new, page, self.table),
            num_free=num_free,
            overflowed=self.overflowed | ~served,
        )
        return cache, granted

    def attend(self, layer, query, key, value, granted):
        """See `Cache.attend`."""
        time = query.shape[1]
        positions = self.lengths[:, None] + jnp.arange(time)
        stored = jnp.arange(time) < granted[:, None]
        column = jnp.minimum(positions // self._page_size, self.table.shape[1] - 1)
        page = jnp.take_along_axis(self.table, column, axis=1)
        page = jnp.where(stored, page, self.keys.shape[1])  # out of bounds: dropped
        slot = positions % self._page_size

        def write(pool, new):
            return pool.at[layer, page, slot].set(new.astype(pool.dtype), mode="drop")

        def read(pool):
            pages = pool[layer, self.table]  # [batch, pages, page_size, kv_heads, head_dim]
            return pages.reshape(len(pages), -1, *pages.shape[3:]).astype(query.dtype)

        keys = write(self.keys, self.rope.rotate(key, positions))
        values = write(self.values, value)
        mixed = attend(
            self.rope.rotate(query, positions),
            read(keys),
            read(values),
            _visible(positions, self.capacity),
        )
        return mixed, self.replace(keys=keys, values=values)

    def advance(self, granted):
        """See `Cache.advance`."""
        return self.replace(lengths=self.lengths + granted)

    def snapshot(self):
        """See `Cache.snapshot`."""
        return self.lengths, self.overflowed

    def rollback(self, snapshot, kept):
        """See `Cache.rollback`; pages that are no longer needed go back to the pool."""
        lengths, overflowed = snapshot
        return self._shortened(jnp.minimum(lengths + kept, self.lengths), overflowed)

    def release(self, rows: Bool[Array, " batch"]) -> "PagedCache":
        """Empties rows and gives their pages back."""
        return self._shortened(jnp.where(rows, 0, self.lengths), self.overflowed & ~rows)

    def _shortened(self, lengths, overflowed):
        held, needed = self._num_pages(self.lengths), self._num_pages(lengths)
        column = jnp.arange(self.table.shape[1])
        back = (column >= needed[:, None]) & (column < held[:, None])
        rank = jnp.cumsum(back.ravel()) - 1
        places = jnp.where(back.ravel(), self.num_free + rank, self.free.shape[0])
        return self.replace(
            free=self.free.at[places].set(self.table.ravel(), mode="drop"),
            num_free=self.num_free + jnp.sum(back, dtype=jnp.int32),
            lengths=lengths,
            overflowed=overflowed,
        )

    def grow(self, capacity: int):
        """See `Cache.grow`; adds as many pages to the pool as all rows need for it.

        Raises:
          ValueError: less than before.
        """
        _more(self.capacity, capacity)
        batch, row_pages = self.table.shape
        more = -(-capacity // self._page_size) - row_pages
        old, new = self.keys.shape[1], max(0, batch * (row_pages + more) - self.keys.shape[1])
        pad = ((0, 0), (0, new), (0, 0), (0, 0), (0, 0))
        free = jnp.concatenate([self.free, jnp.zeros(new, jnp.int32)])
        added = self.num_free + jnp.arange(new)
        return self.replace(
            keys=jnp.pad(self.keys, pad),
            values=jnp.pad(self.values, pad),
            table=jnp.pad(self.table, ((0, 0), (0, more))),
            free=free.at[added].set(old + jnp.arange(new, dtype=jnp.int32)),
            num_free=self.num_free + new,
            overflowed=jnp.zeros_like(self.overflowed),
        )

    def bytes(self) -> dict[str, int]:
        """See `Cache.bytes`; allocated is the whole pool."""
        layers, _, _, kv_heads, head_dim = self.keys.shape
        token = 2 * layers * kv_heads * head_dim * self.keys.dtype.itemsize
        state = (self.table, self.free, self.num_free, self.lengths, self.overflowed)
        return {
            "logical": token * int(jnp.sum(self.lengths)),
            "allocated": self.keys.nbytes + self.values.nbytes,
            "state": sum(array.nbytes for array in state),
        }


# Rows over "data", heads over "model"; a page pool belongs to all rows.
CACHE_RULES = (
    (r"table|lengths|overflowed", PartitionSpec("data")),
    (r"keys|values", PartitionSpec(None, None, None, "model")),
)
DENSE_CACHE_RULES = ((r"keys|values", PartitionSpec(None, "data", None, "model")), *CACHE_RULES)


def _visible(positions, capacity: int):
    """A query sees the slots up to its own position."""
    return jnp.arange(capacity) <= positions[..., None]


def _more(before: int, capacity: int) -> int:
    if capacity < before:
        raise ValueError(f"capacity={capacity} is less than the {before} that the cache has")
    return capacity - before


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
