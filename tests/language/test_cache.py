"""Caches: the same logits as without one, for any split of the tokens, and honest bookkeeping."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icmljax.language import llama
from icmljax.language.cache import CACHE_RULES, Cache, DenseCache, PagedCache
from icmljax.training import mesh as mesh_lib
from tests.language.conftest import TINY, load_golden

paged = functools.partial(PagedCache.create, page_size=4)
CREATE = pytest.mark.parametrize("create", [DenseCache.create, paged], ids=["dense", "paged"])
_extend = jax.jit(llama.extend, static_argnums=1)


@pytest.fixture(scope="module")
def reference(tiny, prompts):
    return np.asarray(llama.forward(tiny[1], tiny[0], prompts[0]))


def _check_rows(params, hidden, expected, start, counts):
    """Logits of the new tokens of each row."""
    logits = np.asarray(llama.logits(params, hidden))
    for row, (begin, count) in enumerate(zip(start, counts, strict=True)):
        np.testing.assert_allclose(
            logits[row, :count], expected[row, begin : begin + count], atol=2e-5
        )


@CREATE
@pytest.mark.parametrize("seed", range(8))
def test_any_split_equals_the_whole(tiny, prompts, reference, create, seed):
    """Chunks of any size, different in each row, empty ones too."""
    config, params = tiny
    generator = np.random.default_rng(seed)
    tokens, lengths = np.asarray(prompts[0]), np.asarray(prompts[1])
    cache, done = create(config, 5, 12), np.zeros(5, int)
    while (done < lengths).any():
        counts = generator.integers(0, np.minimum(4, lengths - done) + 1)
        chunk = np.zeros((5, 4), np.int32)
        for row in range(5):
            piece = tokens[row, done[row] : done[row] + 4]
            chunk[row, : len(piece)] = piece  # what lies beyond `counts` must not matter
        hidden, cache = _extend(params, config, cache, jnp.asarray(chunk), jnp.asarray(counts))
        _check_rows(params, hidden, reference, done, counts)
        done += counts
        np.testing.assert_array_equal(cache.lengths, done)
    assert not cache.overflowed.any()


@CREATE
@pytest.mark.parametrize("chunk", [None, 1, 5, 12, 50])
def test_prefill_in_chunks(tiny, prompts, reference, create, chunk):
    config, params = tiny
    tokens, lengths = prompts
    last, cache = llama.prefill(params, config, create(config, 5, 12), tokens, lengths, chunk=chunk)
    expected = reference[np.arange(5), np.asarray(lengths) - 1]
    np.testing.assert_allclose(llama.logits(params, last), expected, atol=2e-5)
    np.testing.assert_array_equal(cache.lengths, lengths)


@CREATE
def test_real_model_decodes_as_it_reads(smollm2, create):
    config, params = smollm2
    golden = load_golden("forward_a")
    ids, lengths = jnp.asarray(golden["ids"]), np.asarray(golden["lengths"])
    ids = jnp.where(jnp.arange(ids.shape[1]) < lengths[:, None], ids, 0)
    prompt = np.maximum(lengths - 4, 1)
    hidden, cache = _extend(params, config, create(config, 3, 40), ids, jnp.asarray(prompt))
    for step in range(int((lengths - prompt).max())):
        at = prompt + step
        active = at < lengths
        token = ids[np.arange(3), np.minimum(at, lengths - 1)][:, None]
        hidden, cache = _extend(params, config, cache, token, jnp.asarray(active, jnp.int32))
        logits = np.asarray(llama.logits(params, hidden[:, 0]))[:, golden["logit_cols"]]
        for row in np.flatnonzero(active):
            np.testing.assert_allclose(logits[row], golden["logit_vals"][row, at[row]], atol=5e-4)


@CREATE
def test_rollback_equals_never_having_added(tiny, prompts, reference, create):
    config, params = tiny
    tokens, _ = prompts
    _, cache = _extend(params, config, create(config, 5, 16), tokens[:, :6], None)
    snapshot = cache.snapshot()
    wrong = (tokens[:, 6:11] + 1) % config.vocab_size
    kept = jnp.array([0, 1, 2, 3, 5])
    mixed = jnp.where(jnp.arange(5) < kept[:, None], tokens[:, 6:11], wrong)
    _, cache = _extend(params, config, cache, mixed, None)
    cache = jax.jit(lambda cache, kept: cache.rollback(snapshot, kept))(cache, kept)
    np.testing.assert_array_equal(cache.lengths, 6 + kept)
    rest = jnp.stack([jnp.roll(row[6:], -k)[:6] for row, k in zip(tokens, kept, strict=True)])
    hidden, cache = _extend(params, config, cache, rest, 6 - kept)
    _check_rows(params, hidden, reference, 6 + np.asarray(kept), 6 - np.asarray(kept))


@CREATE
def test_a_row_that_does_not_fit_is_left_alone(tiny, prompts, reference, create):
    config, params = tiny
    tokens, _ = prompts
    _, cache = _extend(
        params, config, create(config, 5, 8), tokens[:, :7], jnp.array([7, 5, 7, 1, 2])
    )
    before = cache
    _, cache = _extend(params, config, cache, tokens[:, 7:10], jnp.array([3, 0, 1, 0, 0]))
    np.testing.assert_array_equal(cache.overflowed, [True, False, False, False, False])
    np.testing.assert_array_equal(cache.lengths, [7, 5, 8, 1, 2])
    # Row 0 still holds what it held, and goes on when there is room.
    _, cache = _extend(params, config, cache, tokens[:, 7:8], jnp.array([1, 0, 0, 0, 0]))
    assert cache.lengths[0] == 7
    cache = cache.grow(12)
    assert cache.capacity == 12
    assert not cache.overflowed.any()
    hidden, cache = _extend(params, config, cache, tokens[:, 7:12], jnp.array([5, 0, 0, 0, 0]))
    _check_rows(params, hidden, reference, [7, 0, 0, 0, 0], [5, 0, 0, 0, 0])
    again, _ = _extend(params, config, before, tokens[:, 7:8], jnp.ones(5, jnp.int32))
    assert jnp.isfinite(again).all()


def test_nothing_is_written_outside_of_a_row(tiny, prompts):
    config, params = tiny
    cache = DenseCache.create(config, 5, 8)
    canary = cache.replace(keys=cache.keys + 7.0, values=cache.values + 7.0)
    counts = jnp.array([8, 5, 9, 1, 0])  # row 2 overflows
    _, after = llama.extend(params, config, canary, prompts[0][:, :9], counts)
    for pool in (after.keys, after.values):
        touched = np.asarray((pool != 7.0).any(axis=(0, 3, 4)))
        expected = np.arange(8) < np.array([8, 5, 0, 1, 0])[:, None]
        np.testing.assert_array_equal(touched, expected)


def test_pages_are_shared_and_given_back(tiny, prompts):
    config, params = tiny
    tokens, _ = prompts
    cache = PagedCache.create(config, 5, 12, num_pages=6, page_size=4)
    counts = jnp.array([12, 4, 5, 1, 1])  # 3 + 1 + 2 pages; none is left for two rows
    _, cache = _extend(params, config, cache, tokens, counts)
    np.testing.assert_array_equal(cache.overflowed, [False, False, False, True, True])
    assert cache.num_free == 0
    used = [
        set(np.asarray(cache.table[row, :pages]).tolist()) for row, pages in enumerate((3, 1, 2))
    ]
    assert len(set.union(*used)) == 6
    cache = cache.release(jnp.array([True, False, False, True, False]))
    assert cache.num_free == 3
    assert not cache.overflowed[3]
    _, cache = _extend(params, config, cache, tokens, jnp.array([0, 0, 0, 12, 0]))
    assert cache.num_free == 0
    assert set(np.asarray(cache.table[3]).tolist()) == used[0]
    free_or_used = [*np.asarray(cache.free[: int(cache.num_free)]), *np.asarray(cache.table[3])]
    free_or_used += [*used[1], *used[2]]
    assert sorted(free_or_used) == list(range(6))


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=20)
def test_pages_never_get_lost(data):
    """Any sequence of reservations, rollbacks and releases leaves each page free or in one row."""
    cache = PagedCache.create(TINY, 4, 20, num_pages=11, page_size=3)
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(["add", "rollback", "release"])):
            case "add":
                snapshot = cache.snapshot()
                counts = jnp.array(data.draw(st.lists(st.integers(0, 7), min_size=4, max_size=4)))
                cache, granted = cache.reserve(counts)
                cache = cache.advance(granted)
                kept = jnp.array(data.draw(st.lists(st.integers(0, 7), min_size=4, max_size=4)))
                if data.draw(st.booleans()):
                    cache = cache.rollback(snapshot, kept)
            case "rollback":
                cache = cache.rollback(cache.snapshot(), jnp.zeros(4, jnp.int32))
            case "release":
                cache = cache.release(
                    jnp.array(data.draw(st.lists(st.booleans(), min_size=4, max_size=4)))
                )
        pages = [int(page) for page in cache.free[: int(cache.num_free)]]
        for row, length in enumerate(cache.lengths.tolist()):
            pages += cache.table[row, : -(-length // 3)].tolist()
        assert sorted(pages) == list(range(11))


@CREATE
def test_bytes_are_those_of_the_arrays(tiny, prompts, create):
    config, params = tiny
    _, cache = _extend(params, config, create(config, 5, 12, jnp.bfloat16), prompts[0], prompts[1])
    sizes = cache.bytes()
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    assert sizes["logical"] == token * int(prompts[1].sum())
    assert sizes["allocated"] == 5 * 12 * token
    assert sizes["allocated"] + sizes["state"] == sum(
        leaf.nbytes for leaf in jax.tree.leaves(cache)
    )


@CREATE
def test_protocol(create):
    assert isinstance(create(TINY, 1, 4), Cache)


@CREATE
def test_eight_devices_equal_one(tiny, prompts, reference, create):
    config, params = tiny
    mesh = mesh_lib.make_mesh("data=4,model=2")
    tokens = jnp.concatenate([prompts[0], prompts[0][:3]])
    lengths = jnp.concatenate([prompts[1], prompts[1][:3]])
    cache = create(config, 8, 12)
    placed = jax.device_put(cache, mesh_lib.param_shardings(cache, CACHE_RULES, mesh))
    rules = llama.sharding_rules(config, mesh)
    sharded = jax.device_put(params, mesh_lib.param_shardings(params, rules, mesh))
    hidden, after = _extend(sharded, config, placed, tokens, lengths)
    expected = np.concatenate([reference, reference[:3]])
    _check_rows(params, hidden, expected, np.zeros(8, int), np.asarray(lengths))
    np.testing.assert_array_equal(after.lengths, lengths)


@pytest.mark.bad_input
def test_bad_sizes():
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        DenseCache.create(TINY, 2, 0)
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        PagedCache.create(TINY, 0, 4)
    with pytest.raises(ValueError, match="page_size must be at least 1, got -1"):
        PagedCache.create(TINY, 2, 4, page_size=-1)
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        PagedCache.create(TINY, 2, 4, num_pages=0)
    for create in (DenseCache.create, paged):
        with pytest.raises(ValueError, match="capacity=4 is less than the 8"):
            create(TINY, 2, 8).grow(4)


@pytest.mark.bad_input
def test_bad_chunk(tiny, prompts):
    cache = DenseCache.create(TINY, 5, 12)
    with pytest.raises(ValueError, match="chunk=0; expected 1 or more"):
        llama.prefill(tiny[1], TINY, cache, *prompts, chunk=0)
