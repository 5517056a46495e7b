"""A GPT-2-style decoder after nanoGPT: pre-norm blocks, learned positions, tied embedding."""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

_INIT_STD = 0.02


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. The defaults are GPT-2's smallest model (124M) as nanoGPT trains it.

    Attributes:
      vocab_size: number of tokens; nanoGPT rounds GPT-2's 50257 up to a multiple of 64.
      block_size: longest sequence.
      num_layers: number of blocks.
      num_heads: attention heads of each block; divides `d_model`.
      d_model: width of the residual stream.
      dropout: rate after the embedding, on the attention weights and after each half of a block.
      use_bias: whether dense layers and norms have biases (GPT-2: yes, nanoGPT: no).
      remat: whether the backward pass computes each block again instead of keeping its activations.

    Raises:
      ValueError: a value is out of range.
    """

    vocab_size: int = 50304
    block_size: int = 1024
    num_layers: int = 12
    num_heads: int = 12
    d_model: int = 768
    dropout: float = 0.0
    use_bias: bool = False
    remat: bool = False

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "num_layers", "num_heads", "d_model"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.d_model % self.num_heads:
            raise ValueError(
                f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}; every"
                " head needs the same width"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")


def num_parameters(config: GPTConfig) -> int:
    """Returns the number of parameters, embeddings included (the tied one once)."""
    d_model = config.d_model
    embeddings = (config.vocab_size + config.block_size) * d_model
    norms = (2 * config.num_layers + 1) * d_model
    biases = config.num_layers * 9 * d_model + norms if config.use_bias else 0
    return embeddings + 12 * config.num_layers * d_model**2 + norms + biases


def flops_per_token(config: GPTConfig) -> int:
    """Returns the floating-point operations of the matrix products in one training step per token.

    Forward and backward of a sequence of `block_size`: 6 for each weight of a matrix (the tied
    embedding counts as the output layer) and 12 L d T for attention, which is counted in full
    although half of it is masked. What remat computes again is not counted.

    Reference:
      A. Chowdhery et al., "PaLM" (2022), appendix B.
    """
    weights = 12 * config.num_layers * config.d_model**2 + config.vocab_size * config.d_model
    return 6 * weights + 12 * config.num_layers * config.d_model * config.block_size


@jax.custom_jvp
def gelu(inputs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns x Phi(x), the exact GELU, whose backward pass needs one array of its size.

    That of `jax.nn.gelu` keeps several: a training step of a small GPT on CPU takes 1.5 times as
    long with it.
    """
    return inputs * _normal_cdf(inputs)


@gelu.defjvp
def _gelu_jvp(primals, tangents):
    (inputs,), (tangent,) = primals, tangents
    cdf = _normal_cdf(inputs)
    density = jnp.exp(-0.5 * jnp.square(inputs)) / math.sqrt(2 * math.pi)
    return inputs * cdf, tangent * (cdf + inputs * density)


def _normal_cdf(inputs):
    return 0.5 + 0.5 * jax.lax.erf(inputs / math.sqrt(2))


class CausalSelfAttention(nn.Module):
    """Multi-head attention of every position to itself and the positions before it.

    Attributes:
      config: sizes.
      dtype: type to compute in; the softmax is computed in float32.
    """

    config: GPTConfig
    dtype: Any

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "batch time dim"], deterministic: bool
    ) -> Float[Array, "batch time dim"]:
        """Returns the attention's contribution to the residual stream."""
        config = self.config
        head_dim = config.d_model // config.num_heads
        # Heads have an axis of their own, so that a mesh can split them without moving data.
        query, key, value = jnp.moveaxis(
            _dense(config, (3, config.num_heads, head_dim), self.dtype, name="qkv")(hidden), -3, 0
        )
        time = hidden.shape[1]
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
        scores = jnp.where(
            jnp.tri(time, dtype=bool), scores / math.sqrt(head_dim), jnp.finfo(jnp.float32).min
        )
        weights = nn.softmax(scores).astype(self.dtype)
        weights = nn.Dropout(config.dropout)(weights, deterministic=deterministic)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return _residual_dense(config, (-2, -1), self.dtype, name="projection")(mixed)


class Block(nn.Module):
    """One pre-norm transformer block; `__call__` has the form of the body of a scan.

    Attributes:
      config: sizes.
      dtype: type to compute in.
      activation_sharding: sharding of the residual stream, or None.
    """

    config: GPTConfig
    dtype: Any
    activation_sharding: NamedSharding | None

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "batch time dim"], deterministic: bool
    ) -> tuple[Float[Array, "batch time dim"], None]:
        """Returns the residual stream after the block, and None (a scan's per-step output)."""
        config, dtype = self.config, self.dtype
        dropout = nn.Dropout(config.dropout, deterministic=deterministic)
        normed = _norm(config, dtype, name="attention_norm")(hidden)
        attended = CausalSelfAttention(config, dtype, name="attention")(normed, deterministic)
        hidden = hidden + dropout(attended)
        normed = _norm(config, dtype, name="mlp_norm")(hidden)
        expanded = gelu(_dense(config, 4 * config.d_model, dtype, name="expand")(normed))
        hidden = hidden + dropout(_residual_dense(config, -1, dtype, name="contract")(expanded))
        return _constrain(hidden, self.activation_sharding), None


class GPT(nn.Module):
    """Decoder-only transformer with nanoGPT's conventions (parameters of all blocks are stacked).

    Initial weights are normal(0.02), those of the layers that write to the residual stream
    normal(0.02 / sqrt(2 num_layers)), biases zero; the output layer is the token embedding.

    Attributes:
      config: sizes.
      dtype: type to compute in; parameters are float32, logits too.
      activation_sharding: sharding of the residual stream (batch, time, dim) on a mesh, usually
        `NamedSharding(mesh, P("data"))`. Without it the compiler may replicate activations when
        the parameters are sharded, which costs many times the memory.

    Reference:
      A. Radford et al., "Language Models are Unsupervised Multitask Learners" (2019);
      https://github.com/karpathy/nanoGPT/blob/master/model.py
    """

    config: GPTConfig
    dtype: Any = jnp.float32
    activation_sharding: NamedSharding | None = None

    def __call__(
        self, tokens: Int[Array, "batch time"], *, deterministic: bool = True
    ) -> Float[Array, "batch time vocab"]:
        """Returns the logits of every position's next token, float32.

        Args:
          tokens: in 0 .. vocab_size - 1; time <= block_size.
          deterministic: False switches dropout on, which needs `rngs={"dropout": key}`.

        Raises:
          ValueError: the sequence is longer than `block_size`, or the tokens are no integers.
        """
        return _logits(*self.hidden_states(tokens, deterministic=deterministic))

    @nn.compact
    def hidden_states(
        self, tokens: Int[Array, "batch time"], *, deterministic: bool = True
    ) -> tuple[Float[Array, "batch time dim"], Float[Array, "vocab dim"]]:
        """Returns the normed output of the last block and the embedding that turns it into logits.

        `model.apply(params, tokens, method="hidden_states")` gives what
        `icmljax.nn.cross_entropy.cross_entropy_chunked` needs; arguments and errors are those of
        `__call__`.
        """
        config, dtype = self.config, self.dtype
        time = tokens.shape[1]
        if time > config.block_size:
            raise ValueError(
                f"a sequence of {time} tokens does not fit block_size={config.block_size}; cut it"
                " or use a larger block_size"
            )
        token_embedding = _embed(config.vocab_size, config, dtype, name="token_embedding")
        position_embedding = _embed(config.block_size, config, dtype, name="position_embedding")
        hidden = token_embedding(tokens) + position_embedding(jnp.arange(time))
        hidden = nn.Dropout(config.dropout)(hidden, deterministic=deterministic)
        hidden = _constrain(hidden, self.activation_sharding)

        # A scan keeps recomputation and forward pass apart, so CSE needs no barrier against it.
        block = nn.remat(Block, prevent_cse=False, static_argnums=2) if config.remat else Block
        blocks = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=config.num_layers,
        )(config, dtype, self.activation_sharding, name="blocks")
        hidden, _ = blocks(hidden, deterministic)
        hidden = _norm(config, dtype, name="final_norm")(hidden)
        return hidden, token_embedding.embedding.astype(dtype)


# Fully sharded over "data" (every large matrix) and tensor parallel over "model" (heads, the MLP's
# inner width, the vocabulary). Blocks have the stack of layers as their first axis.
GPT_RULES: tuple[tuple[str, P], ...] = (
    ("token_embedding/embedding", P("model", "data")),
    ("position_embedding/embedding", P(None, "data")),
    ("attention/qkv/kernel", P(None, "data", None, "model", None)),
    ("attention/qkv/bias", P(None, None, "model", None)),
    ("attention/projection/kernel", P(None, "model", None, "data")),
    ("expand/kernel", P(None, "data", "model")),
    ("expand/bias", P(None, "model")),
    ("contract/kernel", P(None, "model", "data")),
)


def decay_mask(params: PyTree) -> PyTree:
    """Returns which parameters weight decay acts on: matrices and embeddings, no norms or biases.

    Args:
      params: parameters of a flax.linen module; decided by name, because stacked norms are
        two-dimensional.

    Returns:
      Tree of bool like `params`, as optax's `mask` arguments take it.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding"), params
    )


def _logits(hidden, embedding):
    return jnp.einsum("btd,vd->btv", hidden, embedding, preferred_element_type=jnp.float32)


def _dense(config: GPTConfig, features: int | tuple[int, ...], dtype, *, name: str):
    return nn.DenseGeneral(
        features,
        use_bias=config.use_bias,
        dtype=dtype,
        kernel_init=nn.initializers.normal(_INIT_STD),
        name=name,
    )


def _residual_dense(config: GPTConfig, axis: int | tuple[int, ...], dtype, *, name: str):
    # 2 L contributions are added up: their variances sum to that of one normal(0.02) layer.
    return nn.DenseGeneral(
        config.d_model,
        axis=axis,
        use_bias=config.use_bias,
        dtype=dtype,
        kernel_init=nn.initializers.normal(_INIT_STD / math.sqrt(2 * config.num_layers)),
        name=name,
    )


def _norm(config: GPTConfig, dtype, *, name: str):
    return nn.LayerNorm(1e-5, use_bias=config.use_bias, dtype=dtype, name=name)


def _embed(num_embeddings: int, config: GPTConfig, dtype, *, name: str):
    init = nn.initializers.normal(_INIT_STD)
    return nn.Embed(num_embeddings, config.d_model, embedding_init=init, dtype=dtype, name=name)


def _constrain(hidden, sharding: NamedSharding | None):
    return hidden if sharding is None else jax.lax.with_sharding_constraint(hidden, sharding)
