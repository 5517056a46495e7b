"""Llama-family decoders: pure functions over a tree of parameters.

The tree of `init`, with L = num_layers, D = d_model, H = num_heads, G = num_kv_heads,
K = head_dim, F = d_ff, E = num_experts, V = vocab_size:

    embedding        [V, D]
    layers           every leaf stacked over layers, or a tuple of L such trees (`unstack_layers`)
      attention_norm [L, D]
      query          [L, D, H, K]
      key, value     [L, D, G, K]
      output         [L, H, K, D]
      mlp_norm       [L, D]
      gate, up       [L, D, F]        with experts [L, E, D, F]
      down           [L, F, D]        with experts [L, E, F, D]
      router         [L, D, E]        with experts only
    final_norm       [D]
    head             [V, D]           absent where the embedding is the head

Matrices of layers, the embedding and the head may be dense or another weight of
`icmljax.language.linear`.
"""

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from icmljax.language.attention import Rope, attend, causal_mask
from icmljax.language.cache import Cache
from icmljax.language.linear import BLOCK, BlockQuantized, linear, quantize
from icmljax.training import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a decoder. The defaults are Llama-2-7B's.

    Attributes:
      vocab_size: number of tokens.
      d_model: width of the residual stream.
      num_layers: number of blocks.
      num_heads: query heads.
      num_kv_heads: key and value heads; divides `num_heads`.
      head_dim: width of a head, even.
      d_ff: inner width of the MLP, of each expert where there are some.
      max_length: longest context the model was trained for.
      rope: rotary positions.
      norm_eps: added to the mean square in RMSNorm.
      tie_embeddings: the embedding is the output head.
      num_experts: 0, or the number of MLPs that a router chooses from.
      experts_per_token: how many it chooses for each token.
      remat: the backward pass computes each block again instead of keeping its activations.

    Raises:
      ValueError: a value is out of range.
    """

    vocab_size: int = 32_000
    d_model: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 32
    head_dim: int = 128
    d_ff: int = 11_008
    max_length: int = 4096
    rope: Rope = Rope()
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 2
    remat: bool = False

    def __post_init__(self):
        sizes = ("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "d_ff", "max_length", "num_experts", "experts_per_token"):
            size = getattr(self, name)
            if isinstance(size, bool) or not hasattr(size, "__index__"):
                raise TypeError(f"{name} must be an int, got {size!r}")
            if size < 1 and name != "num_experts":
                raise ValueError(f"{name} must be at least 1, got {size}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads};"
                " every key and value head serves as many query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions turn pairs")
        if not 0 < self.norm_eps < math.inf:
            raise ValueError(f"norm_eps must be above 0 and finite, got {self.norm_eps}")
        if self.num_experts < 0 or 0 < self.num_experts < self.experts_per_token:
            raise ValueError(
                f"num_experts={self.num_experts} must be 0 or at least experts_per_token="
                f"{self.experts_per_token}"
            )


# The models of the papers, by name. Sizes only; weights are the reader's.
CONFIGS: Mapping[str, LlamaConfig] = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49_152,
        d_model=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        d_ff=1536,
        max_length=8192,
        rope=Rope(theta=100_000.0),
        tie_embeddings=True,
    ),
    "tinyllama-1.1b": LlamaConfig(
        d_model=2048, num_layers=22, num_kv_heads=4, head_dim=64, d_ff=5632, max_length=2048
    ),
    "llama2-7b": LlamaConfig(),
    "llama2-13b": LlamaConfig(
        d_model=5120, num_layers=40, num_heads=40, num_kv_heads=40, d_ff=13_824
    ),
    "llama2-70b": LlamaConfig(
        d_model=8192, num_layers=80, num_heads=64, num_kv_heads=8, d_ff=28_672
    ),
    "internlm2-7b": LlamaConfig(
        vocab_size=92_544,
        num_kv_heads=8,
        d_ff=14_336,
        max_length=32_768,
        rope=Rope(theta=1_000_000.0),
    ),
    "mixtral-8x7b": LlamaConfig(
        num_kv_heads=8,
        d_ff=14_336,
        max_length=32_768,
        rope=Rope(theta=1_000_000.0),
        num_experts=8,
    ),
}


@runtime_checkable
class AttentionFn(Protocol):
    """The attention of all layers; it may carry a state, such as a cache, from layer to layer."""

    def __call__(
        self,
        layer: Int[Array, ""],
        query: Float[Array, "batch time heads head_dim"],
        key: Float[Array, "batch time kv_heads head_dim"],
        value: Float[Array, "batch time kv_heads head_dim"],
        state: Any,
    ) -> tuple[Float[Array, "batch time heads head_dim"], Any, Any]:
        """Mixes values.

        Args:
          layer: which layer, from 0.
          query: before its rotary positions.
          key: before its rotary positions.
          value: one for each key.
          state: what the layer before returned, or the initial state.

        Returns:
          The mixed values; the state for the next layer; anything to be collected from all layers
          (None if nothing).
        """


class Hidden(NamedTuple):
    """What the blocks return.

    Attributes:
      hidden: after the last norm, `[batch, time, dim]`; `logits` takes it.
      state: of the attention, after the last layer.
      collected: what the attention wants collected, stacked over layers.
      router: log-probabilities of experts, `[layers, batch, time, experts]`, or None.
      layers: the residual stream before each block and after the last one,
        `[layers + 1, batch, time, dim]`, where asked for.
    """

    hidden: Any
    state: Any
    collected: Any
    router: Any
    layers: Any


def parameter_shapes(config: LlamaConfig) -> dict[str, Any]:
    """Returns the tree of parameters with a shape for each leaf."""
    d_model, head_dim, d_ff = config.d_model, config.head_dim, config.d_ff
    experts = (config.num_experts,) if config.num_experts else ()
    layer = {
        "attention_norm": (d_model,),
        "query": (d_model, config.num_heads, head_dim),
        "key": (d_model, config.num_kv_heads, head_dim),
        "value": (d_model, config.num_kv_heads, head_dim),
        "output": (config.num_heads, head_dim, d_model),
        "mlp_norm": (d_model,),
        "gate": (*experts, d_model, d_ff),
        "up": (*experts, d_model, d_ff),
        "down": (*experts, d_ff, d_model),
    }
    if experts:
        layer["router"] = (d_model, *experts)
    shapes: dict[str, Any] = {
        "embedding": (config.vocab_size, d_model),
        "layers": {name: (config.num_layers, *shape) for name, shape in layer.items()},
        "final_norm": (d_model,),
    }
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, d_model)
    return shapes


def abstract_params(config: LlamaConfig, dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
    """Returns the tree of parameters with a `jax.ShapeDtypeStruct` for each leaf."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        parameter_shapes(config),
        is_leaf=lambda node: isinstance(node, tuple),
    )


def init(key: PRNGKeyArray, config: LlamaConfig, dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
    """Draws parameters: normal(0.02), into the residual stream normal(0.02 / sqrt(2 L)), norms 1.

    Args:
      key: typed PRNG key.
      config: sizes.
      dtype: of all parameters.

    Returns:
      The tree described at the top of this module, layers stacked.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract_params(config, dtype))
    values = []
    for index, (path, leaf) in enumerate(leaves):
        name = path[-1].key
        if name.endswith("norm"):
            values.append(jnp.ones(leaf.shape, dtype))
            continue
        residual = name in ("output", "down")
        std = 0.02 / math.sqrt(2 * config.num_layers) if residual else 0.02
        draw = jax.random.normal(jax.random.fold_in(key, index), leaf.shape, jnp.float32)
        values.append((std * draw).astype(dtype))
    return jax.tree.unflatten(structure, values)


def num_parameters(config: LlamaConfig) -> int:
    """Returns the number of parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))


def flops_per_token(config: LlamaConfig, context: int) -> int:
    """Returns the floating-point operations of one token's forward pass; a training step takes 3 x.

    Twice the weights of all matrices that the token meets (the head included, the embedding not),
    and 4 H K for each of the `context` tokens that it attends to.
    """
    attention = 2 * config.d_model * config.head_dim * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.d_model * config.d_ff * (config.experts_per_token if config.num_experts else 1)
    router = config.d_model * config.num_experts
    weights = config.num_layers * (attention + mlp + router) + config.vocab_size * config.d_model
    return 2 * weights + 4 * config.num_layers * config.num_heads * config.head_dim * context


def embed(
    params: PyTree, tokens: Int[Array, "batch time"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "batch time dim"]:
    """Looks up the embeddings of tokens, in 0 .. vocab_size - 1."""
    table = params["embedding"]
    if isinstance(table, BlockQuantized):
        rows = jax.tree.map(lambda leaf: leaf[tokens], table)
        return rows.rows(dtype)
    return table[tokens].astype(dtype)


def hidden_states(
    params: PyTree,
    config: LlamaConfig,
    embeddings: Float[Array, "batch time dim"],
    attention_fn: AttentionFn,
    state: Any = None,
    *,
    dtype: Any = None,
    activation_sharding: NamedSharding | None = None,
    return_layers: bool = False,
) -> Hidden:
    """Runs the blocks and the last norm.

    Args:
      params: see the top of this module. Stacked layers run in a `lax.scan`; a tuple of layers
        runs unrolled, which compiles longer and reads weights faster on a CPU.
      config: sizes.
      embeddings: `embed` of tokens, or any other vectors in their place.
      attention_fn: `causal_attention` or that of a cache; see `AttentionFn`.
      state: its initial state.
      dtype: to multiply in; None: that of `embeddings`. The residual stream, norms and scores are
        float32 at least: in the middle layers of trained models it has entries in the thousands.
      activation_sharding: of the residual stream on a mesh, usually `NamedSharding(mesh,
        P("data"))`; without it the compiler may replicate activations.
      return_layers: collect the residual stream of all layers.

    Reference:
      H. Touvron et al., "LLaMA" (2023), section 2.2.
    """
    dtype = embeddings.dtype if dtype is None else jnp.dtype(dtype)

    def constrain(hidden):
        if activation_sharding is None:
            return hidden
        return jax.lax.with_sharding_constraint(hidden, activation_sharding)

    def block(carry, inputs):
        before, state = carry
        index, layer = inputs
        normed = rms_norm(before, layer["attention_norm"], config.norm_eps).astype(dtype)
        query = linear(normed, layer["query"])
        key = linear(normed, layer["key"])
        value = linear(normed, layer["value"])
        mixed, state, collected = attention_fn(index, query, key, value, state)
        hidden = before + linear(mixed, layer["output"], num_in=2).astype(before.dtype)
        normed = rms_norm(hidden, layer["mlp_norm"], config.norm_eps).astype(dtype)
        if config.num_experts:
            update, router = _experts(layer, config, normed)
        else:
            update, router = _swiglu(normed, layer["gate"], layer["up"], layer["down"]), None
        hidden = constrain(hidden + update.astype(hidden.dtype))
        return (hidden, state), (collected, router, before if return_layers else None)

    if config.remat:
        block = jax.checkpoint(block, prevent_cse=not isinstance(params["layers"], Mapping))
    stream = embeddings.astype(jnp.promote_types(embeddings.dtype, jnp.float32))
    carry = constrain(stream), state
    indices = jnp.arange(config.num_layers)
    if isinstance(params["layers"], Mapping):
        carry, outputs = jax.lax.scan(block, carry, (indices, params["layers"]))
    else:
        each = []
        for index, layer in zip(indices, params["layers"], strict=True):
            carry, output = block(carry, (index, layer))
            each.append(output)
        outputs = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    (stream, state), (collected, router, layers) = carry, outputs
    if return_layers:
        layers = jnp.concatenate([layers, stream[None]])
    hidden = rms_norm(stream, params["final_norm"], config.norm_eps).astype(dtype)
    return Hidden(hidden, state, collected, router, layers)


def logits(params: PyTree, hidden: Float[Array, "*lead dim"]) -> Float[Array, "*lead vocab"]:
    """Returns the logits of the next token, float32, from `Hidden.hidden`."""
    head = params["head"] if "head" in params else params["embedding"]
    if isinstance(head, BlockQuantized):
        return linear(hidden, head, dtype=jnp.float32)
    axes = ((hidden.ndim - 1,), (1,)), ((), ())
    return jax.lax.dot_general(
        hidden, head.astype(hidden.dtype), axes, preferred_element_type=jnp.float32
    )


def causal_attention(
    rope: Rope,
    positions: Int[Array, "batch time"],
    segment_ids: Int[Array, "batch time"] | None = None,
) -> AttentionFn:
    """Returns the attention of a whole sequence to itself, without a state.

    Args:
      rope: rotary positions.
      positions: of the tokens, usually 0, 1, ... in each document.
      segment_ids: of documents that share a row; see `icmljax.language.attention.causal_mask`.
    """
    order = positions if segment_ids is None else jnp.arange(positions.shape[1])[None]
    mask = causal_mask(jnp.broadcast_to(order, positions.shape), segment_ids)

    def attention(layer, query, key, value, state):
        del layer
        query, key = rope.rotate(query, positions), rope.rotate(key, positions)
        return attend(query, key, value, mask), state, None

    return attention


def forward(
    params: PyTree,
    config: LlamaConfig,
    tokens: Int[Array, "batch time"],
    *,
    positions: Int[Array, "batch time"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    dtype: DTypeLike = jnp.float32,
    activation_sharding: NamedSharding | None = None,
) -> Float[Array, "batch time vocab"]:
    """Returns the logits of every position's next token, float32, without a cache.

    Args:
      params: see the top of this module.
      config: sizes.
      tokens: in 0 .. vocab_size - 1; padding goes to the right.
      positions: of the tokens; None: 0, 1, ... in every row.
      segment_ids: of documents that share a row.
      dtype: to multiply in.
      activation_sharding: see `hidden_states`.

    Raises:
      ValueError: the tokens are no integers.
    """
    check_tokens(tokens)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    result = hidden_states(
        params,
        config,
        embed(params, tokens, dtype),
        causal_attention(config.rope, positions, segment_ids),
        dtype=dtype,
        activation_sharding=activation_sharding,
    )
    return logits(params, result.hidden)


def extend(
    params: PyTree,
    config: LlamaConfig,
    cache: Cache,
    tokens: Int[Array, "batch time"],
    counts: Int[Array, " batch"] | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "batch time dim"], Cache]:
    """Appends tokens to the rows of a cache: a prompt, a chunk of one, or the next token.

    Args:
      params: see the top of this module.
      config: sizes.
      cache: any `icmljax.language.cache.Cache`.
      tokens: the new tokens of each row, padded on the right.
      counts: how many of them are real, 0 .. time; None: all. A row of 0 stays as it is.
      dtype: to multiply in.

    Returns:
      The hidden states of the new tokens, for `logits` (those of padding mean nothing), and the
      cache. A row that does not fit is left as it was and marked in `cache.overflowed`.
    """
    check_tokens(tokens)
    return extend_embeddings(
        params, config, cache, embed(params, tokens, dtype), counts, dtype=dtype
    )


def extend_embeddings(
    params: PyTree,
    config: LlamaConfig,
    cache: Cache,
    embeddings: Float[Array, "batch time dim"],
    counts: Int[Array, " batch"] | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "batch time dim"], Cache]:
    """Does what `extend` does, with vectors in place of tokens."""
    batch, time = embeddings.shape[:2]
    counts = jnp.full(batch, time) if counts is None else counts
    cache, granted = cache.reserve(counts)

    def attention(layer, query, key, value, cache):
        mixed, cache = cache.attend(layer, query, key, value, granted)
        return mixed, cache, None

    result = hidden_states(params, config, embeddings, attention, cache, dtype=dtype)
    return result.hidden, result.state.advance(granted)


def prefill(
    params: PyTree,
    config: LlamaConfig,
    cache: Cache,
    tokens: Int[Array, "batch time"],
    counts: Int[Array, " batch"],
    *,
    chunk: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "batch dim"], Cache]:
    """Appends prompts and returns the hidden state of the last token of each.

    Args:
      params: see the top of this module.
      config: sizes.
      cache: any cache.
      tokens: prompts, padded on the right.
      counts: their lengths, 1 .. time.
      chunk: tokens at a time; bounds the memory of long prompts. None: all at once.
      dtype: to multiply in.

    Returns:
      Hidden states for `logits`, and the cache.

    Raises:
      ValueError: a chunk below 1, or tokens that are no integers.
    """
    check_tokens(tokens)
    batch, time = tokens.shape
    chunk = time if chunk is None else min(chunk, time)
    if chunk < 1:
        raise ValueError(f"chunk={chunk}; expected 1 or more tokens at a time")
    steps = -(-time // chunk)
    padded = jnp.pad(tokens, ((0, 0), (0, steps * chunk - time)))

    def step(carry, inputs):
        last, cache = carry
        start, piece = inputs
        here = jnp.clip(counts - start, 0, chunk)
        hidden, cache = extend(params, config, cache, piece, here, dtype=dtype)
        end = jnp.take_along_axis(hidden, jnp.maximum(here - 1, 0)[:, None, None], axis=1)[:, 0]
        return (jnp.where(here[:, None] > 0, end, last), cache), None

    carry = jnp.zeros((batch, config.d_model), dtype), cache
    if steps == 1:
        return step(carry, (0, padded))[0]
    pieces = jnp.swapaxes(padded.reshape(batch, steps, chunk), 0, 1)
    return jax.lax.scan(step, carry, (chunk * jnp.arange(steps), pieces))[0]


def rms_norm(
    hidden: Float[Array, "*lead dim"], weight: Float[Array, " dim"], eps: float
) -> Float[Array, "*lead dim"]:
    """Returns ``x / sqrt(mean(x^2) + eps) * weight`` in float32 at least."""
    wide = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide * scale * weight.astype(wide.dtype)


def unstack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Takes the stack of layers apart; `hidden_states` then runs them without a loop.

    A CPU reads weights faster so (a loop copies each layer's first); compilation takes longer.
    """
    layers = params["layers"]
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    parts = tuple(jax.tree.map(operator.itemgetter(i), layers) for i in range(num_layers))
    return {**params, "layers": parts}


def quantize_params(params: Mapping[str, Any], bits: int) -> dict[str, Any]:
    """Rounds the matrices of all layers to `bits` (4 or 8), embedding and head to 8.

    Norms and routers stay dense; so does a matrix whose input 32 does not divide.
    """
    layers = {}
    for name, weight in params["layers"].items():
        if name.endswith("norm") or name == "router":
            layers[name] = weight
            continue
        num_in = 2 if name == "output" else 1
        num_lead = 2 if name in ("gate", "up", "down") and weight.ndim == 4 else 1
        layers[name] = _quantized(weight, bits, num_in, num_lead)
    tables = {
        # A table [V, D] is the transpose of a map from D to V.
        name: _quantized(params[name].T, 8, 1, 0)
        for name in ("embedding", "head")
        if name in params and params[name].shape[1] % BLOCK == 0
    }
    return {**params, **tables, "layers": layers}


def _quantized(weight, bits: int, num_in: int, num_lead: int):
    inputs = math.prod(weight.shape[num_lead : num_lead + num_in])
    if inputs % BLOCK:
        return weight
    return quantize(weight, bits, num_in=num_in, num_lead=num_lead)


# Fully sharded over "data" and tensor parallel over "model": heads, the MLP's inner width, the
# vocabulary. Layers are stacked along the first axis.
LLAMA_RULES: mesh_lib.Rules = (
    ("^(embedding|head)$", P("model", "data")),
    ("layers/(query|key|value)$", P(None, "data", "model", None)),
    ("layers/output$", P(None, "model", None, "data")),
    ("layers/(gate|up)$", P(None, "data", "model")),
    ("layers/down$", P(None, "model", "data")),
    ("(values|scale|offset)$", P(None, "model")),
)
_EXPERT_RULES: mesh_lib.Rules = (
    ("layers/(gate|up)$", P(None, None, "data", "model")),
    ("layers/down$", P(None, None, "model", "data")),
)


def sharding_rules(config: LlamaConfig, mesh: Mesh) -> mesh_lib.Rules:
    """Returns the rules of `icmljax.training.mesh.param_shardings` for a model on a mesh.

    Where heads do not divide over "model" a warning is logged: those weights are then whole on
    every device of that axis, which costs memory and changes no result.
    """
    size = mesh.shape["model"]
    whole = [
        f"{heads} {kind} heads"
        for heads, kind in ((config.num_heads, "query"), (config.num_kv_heads, "key and value"))
        if heads % size
    ]
    if whole:
        logging.warning(
            "%s do not divide over model=%d: their weights are replicated there; sizes of model "
            "that divide both: %s",
            " and ".join(whole),
            size,
            ", ".join(map(str, _divisors(math.gcd(config.num_heads, config.num_kv_heads)))),
        )
    return (*_EXPERT_RULES, *LLAMA_RULES) if config.num_experts else LLAMA_RULES


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def check_tokens(tokens: Any) -> None:
    """Raises ValueError unless `tokens` are integers with axes (batch, time), time >= 1."""
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens are {tokens.dtype}; expected integers in 0 .. vocab_size - 1")
    if tokens.ndim != 2 or tokens.shape[1] < 1:
        raise ValueError(
            f"tokens have shape {tokens.shape}; expected (batch, time) with at least one token"
        )


def _swiglu(inputs, gate, up, down):
    return linear(jax.nn.silu(linear(inputs, gate)) * linear(inputs, up), down)


def _experts(layer, config: LlamaConfig, inputs):
    """A sparse mixture: every token goes to its top experts, however many go to one of them.

    Reference:
      A. Jiang et al., "Mixtral of Experts" (2024), section 2.1: the softmax is over the chosen.
    """
    batch, time, dim = inputs.shape
    chosen = config.experts_per_token
    router = jax.nn.log_softmax(linear(inputs.astype(jnp.float32), layer["router"]))
    top, experts = jax.lax.top_k(router.reshape(-1, config.num_experts), chosen)
    gates = jax.nn.softmax(top)
    # Tokens sorted by expert: each expert multiplies one contiguous group of rows.
    order = jnp.argsort(experts.ravel())
    groups = jnp.bincount(experts.ravel(), length=config.num_experts)
    rows = inputs.reshape(-1, dim)[order // chosen]

    def grouped(rows, weight):
        if isinstance(weight, BlockQuantized):
            weight = weight.dense(rows.dtype)
        return jax.lax.ragged_dot(rows, weight.astype(rows.dtype), groups.astype(jnp.int32))

    inner = jax.nn.silu(grouped(rows, layer["gate"])) * grouped(rows, layer["up"])
    outputs = grouped(inner, layer["down"]) * gates.ravel()[order][:, None].astype(inputs.dtype)
    mixed = jnp.zeros_like(outputs, shape=(batch * time, dim)).at[order // chosen].add(outputs)
    return mixed.reshape(inputs.shape), router.reshape(batch, time, -1)
