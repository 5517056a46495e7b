"""Sampling: the law against a sorting reference, and rows that do not know their neighbours."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from icmljax.language import llama
from icmljax.language.cache import DenseCache, PagedCache
from icmljax.language.generate import GREEDY, Sampling, generate, shape_logits
from tests.language.conftest import TINY, load_golden

WILD = Sampling(1.0, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2)
KEY = jax.random.key(7)


_shape_logits = jax.jit(shape_logits)


def _law(logits, sampling, seen=None):
    seen = None if seen is None else jnp.asarray(seen)
    return np.asarray(jax.nn.softmax(_shape_logits(jnp.asarray(logits), sampling, seen)))


def _softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _sorted_law(logits, top_k=None, top_p=None, min_p=None):
    """The same law the usual way, in float64: sort, and cut."""
    logits = logits.astype(np.float64)
    if top_k is not None:
        logits = np.where(
            logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1], logits, -np.inf
        )
    if top_p is not None:
        law = np.sort(_softmax(logits))[::-1]
        last = law[min(np.searchsorted(np.cumsum(law), top_p - 1e-9), len(law) - 1)]
        logits = np.where(_softmax(logits) >= last, logits, -np.inf)
    if min_p is not None:
        law = _softmax(logits)
        logits = np.where(law >= min_p * law.max() * (1 - 1e-9), logits, -np.inf)
    return _softmax(logits)


@hypothesis.given(
    logits=st.sampled_from([1, 24]).flatmap(
        lambda size: hnp.arrays(
            np.float32, size, elements=st.integers(-80, 80).map(lambda n: n / 8)
        )
    ),
    top_k=st.none() | st.integers(1, 45),
    top_p=st.none() | st.floats(0.03125, 0.96875, width=16),
    min_p=st.none() | st.floats(0.03125, 0.96875, width=16),
)
@hypothesis.settings(max_examples=150)
def test_law_equals_the_one_by_sorting(logits, top_k, top_p, min_p):
    # Distinct values, so that no cut falls between equal ones by a rounding error.
    logits = logits + np.arange(len(logits), dtype=np.float32) / 512
    law = _law(logits, Sampling(1.0, top_k, top_p, min_p))
    np.testing.assert_allclose(law, _sorted_law(logits, top_k, top_p, min_p), atol=1e-5)


def test_limits_of_the_law():
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32) * 3
    plain = _softmax(logits)
    np.testing.assert_allclose(_law(logits, Sampling()), plain, rtol=1e-5)
    off = Sampling(1.0, top_k=50, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    np.testing.assert_allclose(_law(logits, off, np.ones(50, bool)), plain, rtol=1e-5)
    np.testing.assert_allclose(_law(logits, Sampling(2.0)), _softmax(logits / 2), rtol=1e-5)
    certain = np.eye(50)[logits.argmax()]
    for sampling in (GREEDY, Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(min_p=1.0)):
        np.testing.assert_array_equal(_law(logits, sampling), certain)
    # Of equal tokens greedy takes one, top-k all.
    np.testing.assert_array_equal(_law(np.array([0.0, 2, 2, 1]), GREEDY), [0, 1, 0, 0])
    np.testing.assert_array_equal(
        _law(np.array([0.0, 2, 2, 1]), Sampling(top_k=1)), [0, 0.5, 0.5, 0]
    )


def test_repetition_penalty():
    logits, seen = np.array([2.0, -2.0, 1.0, -1.0]), np.array([True, True, False, False])
    law = _law(logits, Sampling(repetition_penalty=2.0), seen)
    np.testing.assert_allclose(law, _softmax(np.array([1.0, -4.0, 1.0, -1.0])), rtol=1e-6)


def test_each_row_has_numbers_of_its_own():
    logits = np.random.default_rng(1).normal(size=(3, 30)).astype(np.float32)
    rows = Sampling(jnp.array([0.0, 1.0, 0.5]), jnp.array([5, 3, 30]), jnp.array([0.9, 1.0, 0.6]))
    laws = _law(logits, rows)
    for row in range(3):
        alone = Sampling(*(None if part is None else part[row] for part in rows))
        np.testing.assert_array_equal(laws[row], _law(logits[row], alone))


def test_tokens_of_the_real_model(smollm2):
    config, params = smollm2
    golden = load_golden("greedy_a")
    prompts = [golden["prompt_ids_0"], golden["prompt_ids_1"]]
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.zeros((2, lengths.max()), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    result = generate(
        params,
        config,
        jnp.asarray(tokens),
        jnp.asarray(lengths),
        KEY,
        max_new_tokens=32,
        sampling=GREEDY,
        eos_ids=(2,),
    )
    for row in range(2):
        expected = golden[f"gen_ids_{row}"]
        got = np.asarray(result.tokens[row])
        np.testing.assert_array_equal(got[: len(expected)], expected)
        assert (got[len(expected) :] == -1).all()
        assert result.counts[row] == len(expected)
        assert result.ended[row] == (expected[-1] == 2)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), WILD], ids=["greedy", "plain", "wild"])
def test_a_row_alone_is_the_row_in_a_batch(tiny, prompts, sampling):
    config, params = tiny
    tokens, lengths = prompts
    options = dict(max_new_tokens=12, sampling=sampling, eos_ids=(3, 9))
    together = generate(params, config, tokens, lengths, KEY, **options)
    assert together.ok.all()
    assert len({int(count) for count in together.counts}) > 1 or sampling is GREEDY
    for row, length in enumerate(lengths):
        alone = generate(
            params,
            config,
            tokens[row : row + 1, :length],
            None,
            jax.random.fold_in(KEY, row)[None],
            **options,
        )
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_allclose(alone.log_probs[0], together.log_probs[row], atol=1e-4)


def test_tokens_are_those_of_the_model_without_a_cache(tiny, prompts):
    """Each token again from a forward pass over all before it, with the documented keys."""
    config, params = tiny
    tokens, lengths = prompts
    result = generate(params, config, tokens, lengths, KEY, max_new_tokens=6, sampling=WILD)
    whole = np.zeros((5, 18), np.int32)
    for row, length in enumerate(lengths.tolist()):
        whole[row, : length + 6] = [*tokens[row, :length].tolist(), *result.tokens[row].tolist()]
    logits = llama.forward(params, config, jnp.asarray(whole))
    for row, length in enumerate(lengths.tolist()):
        for step in range(6):
            end = length + step
            seen = np.isin(np.arange(config.vocab_size), whole[row, :end])
            law = _shape_logits(logits[row, end - 1], WILD, jnp.asarray(seen))
            key = jax.random.fold_in(jax.random.fold_in(KEY, row), step)
            token = int(jax.random.categorical(key, law))
            assert token == whole[row, end]
            np.testing.assert_allclose(
                result.log_probs[row, step], jax.nn.log_softmax(law)[token], atol=1e-4
            )


def test_drawn_tokens_have_the_law(tiny):
    """Chi-square of 20 000 first tokens; a wrong law (another temperature) does not pass."""
    config, params = tiny
    prompt = jnp.array([[1, 2, 3]])
    sampling = Sampling(0.7, top_k=12)
    result = generate(
        params,
        config,
        jnp.tile(prompt, (20_000, 1)),
        None,
        KEY,
        max_new_tokens=1,
        sampling=sampling,
    )
    counts = np.bincount(result.tokens[:, 0], minlength=config.vocab_size)
    logits = llama.forward(params, config, prompt)[0, -1]

    def p_value(sampling):
        law = _law(logits, sampling).astype(np.float64)
        kept = law > 0
        assert counts[~kept].sum() == 0
        return scipy.stats.chisquare(counts[kept], 20_000 * law[kept] / law[kept].sum()).pvalue

    assert p_value(sampling) > 1e-4
    assert p_value(Sampling(0.8, top_k=12)) < 1e-6


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("kind", [DenseCache, PagedCache])
def test_caches_and_chunks_do_not_change_tokens(tiny, prompts, kind, chunk):
    config, params = tiny
    expected = generate(params, config, *prompts, KEY, max_new_tokens=8)
    got = generate(
        params,
        config,
        *prompts,
        KEY,
        max_new_tokens=8,
        cache=kind.create(config, 5, 30),
        chunk=chunk,
    )
    np.testing.assert_array_equal(got.tokens, expected.tokens)


def test_a_conversation_goes_on_in_its_cache(tiny, prompts):
    config, params = tiny
    tokens, lengths = prompts
    cache = DenseCache.create(config, 5, 40)
    first = generate(
        params, config, tokens, lengths, KEY, max_new_tokens=4, sampling=GREEDY, cache=cache
    )
    # The last token of each row is not in the cache: it opens the next prompt.
    more = jnp.concatenate([first.tokens[:, -1:], tokens[:, :3]], axis=1)
    second = generate(
        params, config, more, None, KEY, max_new_tokens=4, sampling=GREEDY, cache=first.cache
    )
    whole = np.zeros((5, 19), np.int32)
    for row, length in enumerate(lengths.tolist()):
        parts = [tokens[row, :length], first.tokens[row], tokens[row, :3]]
        whole[row, : length + 7] = np.concatenate(parts)
    expected = generate(
        params,
        config,
        jnp.asarray(whole),
        lengths + 7,
        KEY,
        max_new_tokens=4,
        sampling=GREEDY,
    )
    np.testing.assert_array_equal(second.tokens, expected.tokens)


def test_callback_streams_what_is_returned(tiny, prompts):
    config, params = tiny
    seen = []

    def callback(tokens, active):
        seen.append(np.where(active, tokens, -1))

    result = generate(
        params, config, *prompts, KEY, max_new_tokens=8, eos_ids=(3, 9), callback=callback
    )
    jax.effects_barrier()
    streamed = np.stack(seen, axis=1)
    np.testing.assert_array_equal(streamed, result.tokens[:, : streamed.shape[1]])
    assert (result.tokens[:, streamed.shape[1] :] == -1).all()


def test_numbers_of_a_law_do_not_compile_again(tiny, prompts):
    config, params = tiny
    from icmljax.language.generate import _generate

    generate(params, config, *prompts, KEY, max_new_tokens=3, sampling=Sampling(0.9, top_p=0.5))
    compiled = _generate._cache_size()
    generate(params, config, *prompts, KEY, max_new_tokens=3, sampling=Sampling(0.2, top_p=0.7))
    assert _generate._cache_size() == compiled


def test_a_row_with_bad_logits_stops_alone(tiny, prompts):
    config, params = tiny
    tokens, lengths = prompts
    tokens = jnp.where(tokens == 60, 0, tokens)
    broken = {**params, "embedding": params["embedding"].at[60].set(jnp.nan)}
    # One token a row: token 60, drawn, would break other rows too.
    expected = generate(params, config, tokens, lengths, KEY, max_new_tokens=1)
    got = generate(broken, config, tokens.at[1, 2].set(60), lengths, KEY, max_new_tokens=1)
    np.testing.assert_array_equal(got.ok, [True, False, True, True, True])
    assert got.counts[1] == 0
    assert (got.tokens[1] == -1).all()
    others = np.array([0, 2, 3, 4])
    np.testing.assert_array_equal(got.tokens[others], expected.tokens[others])


def test_a_full_pool_stops_rows_and_says_so(tiny, prompts):
    config, params = tiny
    cache = PagedCache.create(config, 5, 40, num_pages=10, page_size=4)
    result = generate(params, config, *prompts, KEY, max_new_tokens=8, cache=cache)
    assert not result.ok.all()
    assert (result.counts[~result.ok] < 8).all()
    expected = generate(params, config, *prompts, KEY, max_new_tokens=8)
    for row, count in enumerate(result.counts.tolist()):
        np.testing.assert_array_equal(result.tokens[row, :count], expected.tokens[row, :count])


def test_works_under_jit(tiny, prompts):
    config, params = tiny
    expected = generate(params, config, *prompts, KEY, max_new_tokens=4)

    @jax.jit
    def run(params, tokens, lengths, key):
        return generate(params, config, tokens, lengths, key, max_new_tokens=4).tokens

    np.testing.assert_array_equal(run(params, *prompts, KEY), expected.tokens)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"sampling": Sampling(-1.0)}, "temperature must be 0 or more, got -1.0"),
        ({"sampling": Sampling(top_k=0)}, "top_k must be 1 or more, got 0"),
        ({"sampling": Sampling(top_p=0.0)}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"sampling": Sampling(min_p=1.5)}, r"min_p must be in \[0, 1\], got 1.5"),
        (
            {"sampling": Sampling(temperature=float("nan"))},
            "temperature must be 0 or more, got nan",
        ),
        ({"sampling": Sampling(repetition_penalty=0)}, "repetition_penalty must be above 0, got 0"),
        ({"eos_ids": (61,)}, r"eos_ids \[61\] are not in 0 .. 60"),
        ({"lengths": np.array([1, 2])}, r"lengths have shape \(2,\); expected \(1,\)"),
        ({"lengths": np.array([0])}, r"lengths must lie in 1 .. 3, got \[0\]"),
        ({"lengths": np.array([4])}, r"lengths must lie in 1 .. 3, got \[4\]"),
        ({"tokens": jnp.array([[1, 61, 2]])}, "tokens lie in 1 .. 61; expected 0 .. 60"),
        ({"tokens": jnp.array([[1.0, 2.0, 3.0]])}, "tokens are float32; expected integers"),
        ({"cache": DenseCache.create(TINY, 2, 9)}, "the cache has 2 rows, the prompts have 1"),
        ({"cache": DenseCache.create(TINY, 1, 5)}, r"needs room for 6 tokens.*cache.grow\(6\)"),
        ({"key": jax.random.split(KEY, 3)}, r"key has shape \(3,\); expected one key"),
    ],
)
def test_bad_input(tiny, changes, message):
    config, params = tiny
    arguments = dict(tokens=jnp.array([[1, 2, 3]]), lengths=None, key=KEY, max_new_tokens=4)
    with pytest.raises(ValueError, match=message):
        generate(params, config, **(arguments | changes))


@pytest.mark.bad_input
def test_untyped_key(tiny):
    config, params = tiny
    with pytest.raises(TypeError, match="key has dtype uint32; expected a typed key"):
        generate(params, config, jnp.array([[1]]), None, jax.random.PRNGKey(0), max_new_tokens=1)
