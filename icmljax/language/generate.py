"""Sampling from a language model: the law of the next token, and one jitted loop that draws."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, PyTree

from icmljax.language import llama
from icmljax.language.cache import Cache, DenseCache
from icmljax.language.llama import LlamaConfig


class Sampling(NamedTuple):
    """How the law of the next token is shaped; the steps are applied in this order.

    Every number may be a Python number or an array, one for each row; None leaves the step out.
    Changing numbers does not compile again, changing which steps there are does.

    Attributes:
      repetition_penalty: > 0; logits of tokens that the row holds already are divided by it where
        positive, multiplied where negative. 1 changes nothing.
      temperature: >= 0; divides the logits. 0: only the most likely token is left.
      top_k: >= 1; only the k most likely tokens are left (and all that are as likely as the last).
      top_p: in (0, 1]; only the fewest most likely tokens with at least this probability are left.
      min_p: in [0, 1]; only tokens at least this fraction as likely as the most likely are left.

    Reference:
      N. Keskar et al., "CTRL" (2019), section 4.1 (repetition penalty); A. Holtzman et al., "The
      Curious Case of Neural Text Degeneration" (2020), section 3.1 (top-p); M. Nguyen et al.,
      "Turning Up the Heat: Min-p Sampling" (2024).
    """

    temperature: Any = 1.0
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None

    def check(self) -> None:
        """Raises ValueError for numbers out of range; traced numbers are not looked at."""
        ranges = {
            "temperature": (lambda x: x >= 0, "0 or more"),
            "top_k": (lambda x: x >= 1, "1 or more"),
            "top_p": (lambda x: (x > 0) & (x <= 1), "in (0, 1]"),
            "min_p": (lambda x: (x >= 0) & (x <= 1), "in [0, 1]"),
            "repetition_penalty": (lambda x: x > 0, "above 0"),
        }
        for name, (valid, expected) in ranges.items():
            value = getattr(self, name)
            if value is None or isinstance(value, jax.core.Tracer):
                continue
            if not np.all(valid(np.asarray(value))):
                raise ValueError(f"{name} must be {expected}, got {value}")


GREEDY = Sampling(temperature=0.0)


class Generated(NamedTuple):
    """What `generate` returns.

    Attributes:
      tokens: int32 `[batch, max_new_tokens]`; -1 behind the last token of a row. An end token is
        the last of its row.
      counts: number of new tokens, int32 `[batch]`.
      ended: rows that ended with one of `eos_ids`, bool `[batch]`.
      ok: False for rows that stopped because logits were not finite or the cache was full.
      log_probs: of the tokens under the law they were drawn from, float32; 0 behind the last.
      cache: it holds prompt and new tokens, but for the last token of each row.
    """

    tokens: Any
    counts: Any
    ended: Any
    ok: Any
    log_probs: Any
    cache: Any


def shape_logits(
    logits: Float[Array, "*lead vocab"],
    sampling: Sampling,
    seen: Bool[Array, "*lead vocab"] | None = None,
) -> Float[Array, "*lead vocab"]:
    """Applies the steps of `sampling`: the law to draw from is the softmax of the result.

    Nothing is sorted: thresholds are found by bisection on the bits of the values, which are
    sums over the vocabulary only, cheap where that is split over a mesh.

    Args:
      logits: of the model.
      sampling: see `Sampling`; arrays in it have the shape `lead`.
      seen: the tokens that a row holds, for the repetition penalty.

    Returns:
      float32 logits, -inf for tokens that are out.
    """
    logits = logits.astype(jnp.float32)
    if sampling.repetition_penalty is not None and seen is not None:
        penalty = jnp.asarray(sampling.repetition_penalty, jnp.float32)[..., None]
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    temperature = jnp.asarray(sampling.temperature, jnp.float32)[..., None]
    # Greedy: the first of the most likely tokens, as argmax has it.
    best = jnp.arange(logits.shape[-1]) == jnp.argmax(logits, axis=-1, keepdims=True)
    greedy = jnp.where(best, 0.0, -jnp.inf)
    logits = jnp.where(temperature > 0, logits / jnp.where(temperature > 0, temperature, 1), greedy)
    if sampling.top_k is not None:
        top_k = jnp.asarray(sampling.top_k)[..., None]
        ones = jnp.ones_like(logits)
        logits = jnp.where(_heaviest(logits, ones, top_k), logits, -jnp.inf)
    if sampling.top_p is not None:
        top_p = jnp.asarray(sampling.top_p, jnp.float32)[..., None]
        kept = _heaviest(logits, jax.nn.softmax(logits), top_p)
        logits = jnp.where(kept, logits, -jnp.inf)
    if sampling.min_p is not None:
        min_p = jnp.asarray(sampling.min_p, jnp.float32)[..., None]
        floor = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)
        logits = jnp.where(logits >= floor, logits, -jnp.inf)
    return logits


def _heaviest(values, weights, mass):
    """The fewest largest values whose weights sum to `mass` or more; all if they never do."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    order = jnp.where(bits >= sign, ~bits, bits | sign)  # unsigned, in the order of the values

    def narrow(index, threshold):
        candidate = threshold | sign >> index.astype(jnp.uint32)
        above = jnp.sum(jnp.where(order >= candidate, weights, 0), axis=-1, keepdims=True)
        return jnp.where(above >= mass, candidate, threshold)

    threshold = jnp.zeros((*values.shape[:-1], 1), jnp.uint32)
    return order >= jax.lax.fori_loop(0, 32, narrow, threshold)


def generate(
    params: PyTree,
    config: LlamaConfig,
    tokens: Int[Array, "batch time"],
    lengths: Int[Array, " batch"] | None,
    key: PRNGKeyArray | Key[Array, " batch"],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    eos_ids: tuple[int, ...] = (),
    cache: Cache | None = None,
    chunk: int | None = None,
    dtype: DTypeLike = jnp.float32,
    callback: Callable[[np.ndarray, np.ndarray], None] | None = None,
) -> Generated:
    """Continues prompts, each row on its own.

    One jitted `lax.while_loop`; rows end at an end token, and the loop ends with its last row. What
    a row gets depends on its prompt and key alone, not on its neighbours or padding (up to rounding
    of the matrix products, which may differ with the size of the batch).

    Args:
      params: of `icmljax.language.llama`.
      config: sizes.
      tokens: prompts, padded on the right; continues what `cache` holds, if it is given.
      lengths: of the prompts, 1 .. time; None: all of them full.
      key: one for each row, or one for all: row i then uses ``fold_in(key, i)``. The n-th new
        token of a row is drawn with ``fold_in(row key, n)``.
      max_new_tokens: most tokens to draw in each row.
      sampling: the law.
      eos_ids: end tokens.
      cache: where keys and values go; None: a `DenseCache` just large enough. It is donated: use
        the returned one after it.
      chunk: tokens of the prompts at a time.
      dtype: to multiply in, and of the cache that is made here.
      callback: called as the loop runs with the new token of each row, int32 `[batch]`, and which
        rows have one, bool `[batch]`. Keep one function object: each new one compiles again.

    Raises:
      ValueError: lengths, sampling, ids or the capacity of the cache are out of range.
      TypeError: a key that is not typed.
    """
    llama.check_tokens(tokens)
    batch, time = tokens.shape
    _check(config, tokens, lengths, key, max_new_tokens, sampling, eos_ids)
    lengths = jnp.full(batch, time, jnp.int32) if lengths is None else jnp.asarray(lengths)
    capacity = time + max_new_tokens - 1
    if cache is None:
        cache = DenseCache.create(config, batch, capacity, dtype)
    elif cache.lengths.shape != (batch,):
        raise ValueError(f"the cache has {len(cache.lengths)} rows, the prompts have {batch}")
    elif not isinstance(cache.lengths, jax.core.Tracer):
        need = int(jnp.max(cache.lengths + lengths)) + max_new_tokens - 1
        if need > cache.capacity:
            raise ValueError(
                f"a row needs room for {need} tokens, but the cache has a capacity of "
                f"{cache.capacity}; give it more with cache.grow({need})"
            )
    keys = (
        jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(batch)) if not key.ndim else key
    )
    return _generate(
        params,
        cache,
        tokens,
        lengths,
        keys,
        sampling,
        config=config,
        max_new_tokens=max_new_tokens,
        eos_ids=tuple(eos_ids),
        chunk=chunk,
        dtype=jnp.dtype(dtype),
        callback=callback,
    )


class _Rows(NamedTuple):
    """The state of the loop."""

    step: Any  # tokens drawn so far
    active: Any
    last: Any  # the token to feed next
    seen: Any  # for the repetition penalty, or None
    result: Generated


@functools.partial(
    jax.jit,
    static_argnames=("config", "max_new_tokens", "eos_ids", "chunk", "dtype", "callback"),
    donate_argnames="cache",
)
def _generate(
    params,
    cache,
    tokens,
    lengths,
    keys,
    sampling,
    *,
    config,
    max_new_tokens,
    eos_ids,
    chunk,
    dtype,
    callback,
):
    batch, time = tokens.shape

    def on_host(token, emitted):
        callback(np.asarray(token), np.asarray(emitted))

    def draw(rows: _Rows, hidden, cache) -> _Rows:
        """Draws the next token of every active row."""
        logits = llama.logits(params, hidden)
        usable = jnp.all(jnp.isfinite(logits), axis=-1) & ~cache.overflowed
        law = shape_logits(logits, sampling, rows.seen)
        now = jax.vmap(jax.random.fold_in, (0, None))(keys, rows.step)
        token = jax.vmap(jax.random.categorical)(now, law).astype(jnp.int32)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(law), token[:, None], axis=1)[:, 0]
        emitted = rows.active & usable
        ends = emitted & jnp.isin(token, jnp.asarray(eos_ids, jnp.int32))
        if callback is not None:
            io_callback(on_host, None, token, emitted, ordered=True)
        old = rows.result
        result = Generated(
            tokens=old.tokens.at[:, rows.step].set(jnp.where(emitted, token, -1)),
            counts=old.counts + emitted,
            ended=old.ended | ends,
            ok=old.ok & (usable | ~rows.active),
            log_probs=old.log_probs.at[:, rows.step].set(jnp.where(emitted, log_prob, 0)),
            cache=cache,
        )
        seen = rows.seen
        if seen is not None:
            seen = seen.at[jnp.arange(batch), token].max(emitted)
        return _Rows(rows.step + 1, emitted & ~ends, token, seen, result)

    def step(rows: _Rows) -> _Rows:
        hidden, cache = llama.extend(
            params,
            config,
            rows.result.cache,
            rows.last[:, None],
            rows.active.astype(jnp.int32),
            dtype=dtype,
        )
        return draw(rows, hidden[:, 0], cache)

    seen = None
    if sampling.repetition_penalty is not None:
        real = jnp.arange(time) < lengths[:, None]
        seen = jnp.zeros((batch, config.vocab_size), bool)
        seen = seen.at[jnp.arange(batch)[:, None], tokens].max(real)
    hidden, cache = llama.prefill(params, config, cache, tokens, lengths, chunk=chunk, dtype=dtype)
    nothing = Generated(
        tokens=jnp.full((batch, max_new_tokens), -1, jnp.int32),
        counts=jnp.zeros(batch, jnp.int32),
        ended=jnp.zeros(batch, bool),
        ok=jnp.ones(batch, bool),
        log_probs=jnp.zeros((batch, max_new_tokens), jnp.float32),
        cache=cache,
    )
    start = _Rows(jnp.asarray(0), jnp.ones(batch, bool), jnp.zeros(batch, jnp.int32), seen, nothing)
    rows = jax.lax.while_loop(
        lambda rows: (rows.step < max_new_tokens) & jnp.any(rows.active),
        step,
        draw(start, hidden, cache),
    )
    return rows.result


def _check(config, tokens, lengths, key, max_new_tokens, sampling, eos_ids):
    batch, time = tokens.shape
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"key has dtype {key.dtype}; expected a typed key from jax.random.key(seed)"
        )
    if key.shape not in ((), (batch,)):
        raise ValueError(
            f"key has shape {key.shape}; expected one key, or one for each of {batch} rows"
        )
    sampling.check()
    if bad := [i for i in eos_ids if not 0 <= i < config.vocab_size]:
        raise ValueError(f"eos_ids {bad} are not in 0 .. {config.vocab_size - 1}")
    if lengths is not None and np.shape(lengths) != (batch,):
        raise ValueError(f"lengths have shape {np.shape(lengths)}; expected ({batch},), one a row")
    if lengths is not None and not isinstance(lengths, jax.core.Tracer):
        numbers = np.asarray(lengths)
        if numbers.min() < 1 or numbers.max() > time:
            raise ValueError(f"lengths must lie in 1 .. {time}, got {numbers.tolist()}")
    if not isinstance(tokens, jax.core.Tracer):
        ids = np.asarray(tokens)
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            raise ValueError(
                f"tokens lie in {ids.min()} .. {ids.max()}; expected 0 .. {config.vocab_size - 1}"
            )
