"""Training of language models: losses over packed rows, distillation, LoRA."""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from icmljax.language import llama
from icmljax.language.linear import BLOCK, BlockQuantized, LowRank
from icmljax.language.llama import LlamaConfig
from icmljax.nn.cross_entropy import in_chunks, token_losses, weighted_mean
from icmljax.training.state import LossFn

# Input and output axes of the matrices of a layer, by name.
_AXES = {
    "query": (1, 2),
    "key": (1, 2),
    "value": (1, 2),
    "output": (2, 1),
    "gate": (1, 1),
    "up": (1, 1),
    "down": (1, 1),
    "router": (1, 1),
}


def make_loss(
    config: LlamaConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    chunk: int | None = None,
    router_weight: float = 0.0,
    activation_sharding: NamedSharding | None = None,
) -> LossFn:
    """Returns the loss of next tokens, for `icmljax.training.state.make_train_step`.

    Batches are those of `icmljax.data.text.pack`, whose "tokens" and "targets" are needed. Without
    "segments" a row is one document, without "positions" they are 0, 1, ... in every row, without
    "weights" all targets count the same.

    Args:
      config: sizes.
      dtype: to multiply in; the loss is float32.
      chunk: positions whose logits are held at a time; divides the length. None: all.
      router_weight: of `load_balancing_loss`, which is added where the model has experts.
      activation_sharding: of the residual stream on a mesh; see `llama.hidden_states`.

    Returns:
      ``(params, batch, key) -> (loss, aux)``, without randomness. The loss is the mean over the
      weights of the batch: with accumulated gradients, of each micro-batch. aux has "accuracy", the
      weighted share of targets that have the largest logit; "tokens", the number of targets with
      weight; and with experts "router_loss".

    Raises:
      ValueError: `router_weight` without experts, or negative; when called, if an array of the
        batch is missing or has another shape, or `chunk` does not divide the length.
    """
    if router_weight < 0 or (router_weight and not config.num_experts):
        raise ValueError(
            f"router_weight={router_weight} with num_experts={config.num_experts}; expected 0 or "
            "more, and 0 without experts"
        )

    def loss_fn(params, batch, key):
        del key
        _check_batch(batch, ("tokens", "targets"))
        result = _hidden(params, config, batch, dtype, activation_sharding)

        def scores(hidden, targets):
            logits = llama.logits(params, hidden)
            return token_losses(logits, targets), jnp.argmax(logits, axis=-1) == targets

        inputs = result.hidden, batch["targets"]
        losses, correct = scores(*inputs) if chunk is None else in_chunks(scores, inputs, chunk)
        weights = batch.get("weights")
        loss = weighted_mean(losses, weights)
        aux = {
            "accuracy": weighted_mean(correct.astype(losses.dtype), weights),
            "tokens": jnp.float32(losses.size if weights is None else jnp.sum(weights > 0)),
        }
        if config.num_experts:
            real = None if "segments" not in batch else batch["segments"] > 0
            aux["router_loss"] = load_balancing_loss(result.router, config.experts_per_token, real)
            loss = loss + router_weight * aux["router_loss"]
        return loss, aux

    return loss_fn


def load_balancing_loss(
    router: Float[Array, "layers batch time experts"],
    experts_per_token: int,
    weights: Float[Array, "batch time"] | Bool[Array, "batch time"] | None = None,
) -> Float[Array, ""]:
    """Returns E sum_e f_e p_e, mean over layers: 1 where experts are used evenly, at most E.

    f_e is the share of all choices that fell on expert e (without a gradient), p_e its mean
    probability.

    Args:
      router: log-probabilities of experts, `llama.Hidden.router`.
      experts_per_token: how many are chosen.
      weights: how much each token counts, usually 0 for padding; None: all the same.

    Reference:
      W. Fedus et al., "Switch Transformers" (2021), equation 4.
    """
    num_experts = router.shape[-1]
    chosen = jax.nn.one_hot(jax.lax.top_k(router, experts_per_token)[1], num_experts)

    def mean(values):  # [batch, time]
        return weighted_mean(values, weights)

    over_tokens = jax.vmap(jax.vmap(mean, in_axes=2))  # layers, then experts
    fractions = over_tokens(jnp.mean(chosen, axis=-2))
    probabilities = over_tokens(jnp.exp(router))
    return num_experts * jnp.mean(jnp.sum(fractions * probabilities, axis=-1))


def distillation_loss(
    student_logits: Float[Array, "batch time vocab"],
    teacher_logits: Float[Array, "batch time vocab"],
    *,
    temperature: float = 1.0,
    weights: Float[Array, "batch time"] | Bool[Array, "batch time"] | None = None,
) -> Float[Array, ""]:
    """Returns T^2 KL(teacher || student) in nats, both at temperature T, weighted mean over tokens.

    The factor keeps the size of gradients independent of the temperature. There is no gradient for
    the teacher.

    Args:
      student_logits: unnormalised log-probabilities.
      teacher_logits: the same of the teacher; -inf excludes a token.
      temperature: T > 0; divides the logits.
      weights: how much each token counts; None: all the same. If all are 0, so is the loss.

    Returns:
      Float32 at least.

    Raises:
      ValueError: the shapes differ, or the temperature is not positive.

    Reference:
      G. Hinton et al., "Distilling the Knowledge in a Neural Network" (2015), section 2.
    """
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student logits have shape {student_logits.shape}, teacher logits "
            f"{teacher_logits.shape}; expected the same tokens and the same vocabulary"
        )
    _check_temperature(temperature)

    def log_probabilities(logits):
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return jax.nn.log_softmax(wide / temperature)

    student = log_probabilities(student_logits)
    teacher = jax.lax.stop_gradient(log_probabilities(teacher_logits))
    probabilities = jnp.exp(teacher)
    difference = jnp.where(probabilities > 0, teacher - student, 0)
    divergence = jnp.sum(probabilities * difference, axis=-1)
    return temperature**2 * weighted_mean(divergence, weights)


def make_distillation_loss(
    config: LlamaConfig,
    *,
    temperature: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    activation_sharding: NamedSharding | None = None,
) -> LossFn:
    """Returns `distillation_loss` of a model to the "teacher_logits" of its batches.

    Args:
      config: sizes of the student.
      temperature: as for `distillation_loss`.
      dtype: to multiply in; the loss is float32.
      activation_sharding: see `llama.hidden_states`.

    Returns:
      ``(params, batch, key) -> (loss, {})``, without randomness. Batches are those of `make_loss`
      with "teacher_logits" ``[batch, time, vocab]`` in place of "targets".

    Raises:
      ValueError: the temperature is not positive; when called, if an array of the batch is missing
        or has another shape.
    """
    _check_temperature(temperature)

    def loss_fn(params, batch, key):
        del key
        _check_batch(batch, ("tokens", "teacher_logits"))
        result = _hidden(params, config, batch, dtype, activation_sharding)
        student = llama.logits(params, result.hidden)
        loss = distillation_loss(
            student,
            batch["teacher_logits"],
            temperature=temperature,
            weights=batch.get("weights"),
        )
        return loss, {}

    return loss_fn


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")


def _check_batch(batch: Mapping[str, Any], needed: tuple[str, ...]) -> None:
    missing = [name for name in needed if name not in batch]
    if missing:
        raise ValueError(
            f"the batch has {sorted(batch)} and lacks {missing}; icmljax.data.text.pack makes "
            "batches of documents"
        )
    llama.check_tokens(batch["tokens"])
    shape = batch["tokens"].shape
    for name in ("targets", "positions", "segments", "weights"):
        if name in batch and batch[name].shape != shape:
            raise ValueError(
                f"{name!r} of the batch has shape {batch[name].shape}; expected that of the "
                f"tokens, {shape}"
            )


def _hidden(params, config: LlamaConfig, batch, dtype, activation_sharding) -> llama.Hidden:
    tokens = batch["tokens"]
    positions = batch.get("positions", jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
    return llama.hidden_states(
        params,
        config,
        llama.embed(params, tokens, dtype),
        llama.causal_attention(config.rope, positions, batch.get("segments")),
        dtype=dtype,
        activation_sharding=activation_sharding,
    )


def llama_decay_mask(params: PyTree) -> PyTree:
    """Returns which parameters weight decay acts on: all but the norms, decided by name.

    Args:
      params: of `llama.init`, or adapters of `init_lora`.

    Returns:
      Tree of bool like `params`, as optax's `mask` arguments take it.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not _name(path).endswith("norm"), params
    )


def init_lora(
    key: PRNGKeyArray,
    params: PyTree,
    rank: int,
    *,
    targets: str = r"layers/(query|key|value|output)$",
) -> dict[str, dict[str, Array]]:
    """Draws adapters: low-rank updates of some matrices of all layers, all 0 at first.

    `down` is uniform in +-1/sqrt(in), as in the authors' code, `up` is 0. Train the adapters alone,
    with the parameters as they are::

        def lora_loss(adapters, batch, key):
            return loss_fn(attach_lora(params, adapters), batch, key)

    Args:
      key: typed PRNG key.
      params: of `llama.init`; matrices may be dense or `BlockQuantized`.
      rank: 1 or more.
      targets: regular expression, searched in the "/"-joined paths of parameters.

    Returns:
      By path, float32 "down" ``[layers, in, rank]`` and "up" ``[layers, rank, out]``.

    Raises:
      ValueError: a rank below 1; `targets` finds nothing, or something that is no matrix of a
        layer; or it finds experts.

    Reference:
      E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), section 4.1.
    """
    if rank < 1:
        raise ValueError(f"rank={rank}; expected 1 or more")
    adapters = {}
    weights = _weights(params)
    for index, (path, weight) in enumerate(weights.items()):
        if not re.search(targets, path):
            continue
        lead, inputs, outputs = _matrix_shape(path, weight)
        bound = inputs**-0.5
        adapters[path] = {
            "down": jax.random.uniform(
                jax.random.fold_in(key, index), (*lead, inputs, rank), jnp.float32, -bound, bound
            ),
            "up": jnp.zeros((*lead, rank, outputs), jnp.float32),
        }
    if not adapters:
        raise ValueError(
            f"targets={targets!r} finds none of the parameters; they are {', '.join(weights)}"
        )
    return adapters


def attach_lora(
    params: PyTree, adapters: Mapping[str, Mapping[str, Array]], *, alpha: float | None = None
) -> PyTree:
    """Returns parameters whose targeted weights are `icmljax.language.linear.LowRank`.

    Args:
      params: those that the adapters were made for.
      adapters: of `init_lora`.
      alpha: updates are multiplied with alpha / rank; None: with 1.

    Raises:
      ValueError: the adapters do not fit the parameters.
    """
    return _replace(params, adapters, alpha, lambda low_rank: low_rank)


def merge_lora(
    params: PyTree, adapters: Mapping[str, Mapping[str, Array]], *, alpha: float | None = None
) -> PyTree:
    """Returns parameters with the updates added; `BlockQuantized` ones that have one become dense.

    Arguments and errors are those of `attach_lora`. Sums are float32, results have the type of the
    dense base, float32 for a `BlockQuantized` one.
    """
    return _replace(params, adapters, alpha, _merged)


def _merged(weight: LowRank) -> Array:
    base = weight.base
    dense = base.dense() if isinstance(base, BlockQuantized) else base
    update = weight.scale * (weight.down @ weight.up)
    return (dense + update.reshape(dense.shape)).astype(dense.dtype)


def _replace(params, adapters, alpha, make):
    weights = _weights(params)
    unknown = sorted(set(adapters) - set(weights))
    if unknown or not adapters:
        raise ValueError(
            f"adapters for {unknown or 'nothing'}, but the parameters are {', '.join(weights)}; "
            "make adapters with init_lora for these parameters"
        )
    for path, adapter in adapters.items():
        weights[path] = make(_low_rank(path, weights[path], adapter, alpha))
    return jax.tree.unflatten(jax.tree.structure(params, is_leaf=_is_weight), weights.values())


def _low_rank(path: str, base, adapter, alpha: float | None) -> LowRank:
    lead, inputs, outputs = _matrix_shape(path, base)
    down, up = adapter["down"], adapter["up"]
    rank = down.shape[-1]
    if down.shape != (*lead, inputs, rank) or up.shape != (*lead, rank, outputs):
        raise ValueError(
            f"the adapter of {path!r} has down {down.shape} and up {up.shape}; expected "
            f"{(*lead, inputs, 'rank')} and {(*lead, 'rank', outputs)}"
        )
    return LowRank(base, down, up, 1.0 if alpha is None else alpha / rank)


def _is_weight(node: Any) -> bool:
    return isinstance(node, BlockQuantized | LowRank)


def _weights(params: PyTree) -> dict[str, Any]:
    """All weights by their "/"-joined path, in the order of the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_weight)
    return {_name(path): leaf for path, leaf in leaves}


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _matrix_shape(path: str, weight: Any) -> tuple[tuple[int, ...], int, int]:
    """(leading axes, inputs, outputs) of a matrix that can have an adapter."""
    group, _, name = path.rpartition("/")
    if isinstance(weight, LowRank) or not group.startswith("layers") or name not in _AXES:
        raise ValueError(
            f"{path!r} cannot have an adapter: expected one of the matrices {', '.join(_AXES)} of "
            "'layers', without an adapter; merge an earlier one with merge_lora"
        )
    if isinstance(weight, BlockQuantized):
        *lead, outputs, blocks, _ = weight.values.shape
        inputs = blocks * BLOCK
    else:
        num_in, num_out = _AXES[name]
        end = weight.ndim - num_in - num_out
        lead = weight.shape[:end]
        inputs = math.prod(weight.shape[end : end + num_in])
        outputs = math.prod(weight.shape[end + num_in :])
    if len(lead) > (group == "layers"):
        raise ValueError(
            f"{path!r} holds the matrices of experts, which adapters do not support; choose "
            "targets among attention and router"
        )
    return tuple(lead), inputs, outputs
