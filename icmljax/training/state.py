"""Train state and the step builders: pure functions over any ``loss_fn(params, batch, key)``."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray, PyTree

# loss_fn(params, batch, key) -> (scalar loss, auxiliary metrics); all this floor knows of a model.
LossFn = Callable[[PyTree, PyTree, PRNGKeyArray], tuple[Any, Mapping[str, Any]]]
Metrics = dict[str, Array]


class TrainState(NamedTuple):
    """Everything that a training step changes.

    Attributes:
      step: int32 scalar, number of steps done.
      params: tree of parameters.
      opt_state: the optimizer's state.
      key: typed PRNG key of the run. It never changes: a step uses ``fold_in(key, step)``.
    """

    # Not annotated more closely: trees of shapes and of shardings use the same structure.
    step: Any
    params: Any
    opt_state: Any
    key: Any


@dataclasses.dataclass(frozen=True)
class Precision:
    """Mixed-precision policy.

    Attributes:
      params: dtype in which floating-point parameters are kept.
      compute: dtype to which floating-point parameters and batch leaves are cast before the loss.
    """

    params: DTypeLike = jnp.float32
    compute: DTypeLike = jnp.float32

    @classmethod
    def from_string(cls, name: str) -> "Precision":
        """Returns the policy of a name.

        Args:
          name: "f32", "bf16" (parameters in f32, compute in bf16) or "bf16_params" (both in bf16).

        Raises:
          ValueError: for any other name.
        """
        policies = {
            "f32": cls(),
            "bf16": cls(compute=jnp.bfloat16),
            "bf16_params": cls(params=jnp.bfloat16, compute=jnp.bfloat16),
        }
        if name not in policies:
            raise ValueError(f"unknown precision {name!r}; expected one of {', '.join(policies)}")
        return policies[name]


def _cast(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """Casts floating-point leaves; integers, booleans and keys stay as they are."""

    def cast(leaf):
        return jnp.asarray(leaf, dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)


def _at_least_f32(tree: PyTree) -> PyTree:
    """Casts leaves narrower than float32 up, so that sums over them do not lose digits."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree)


def _with_metrics(metrics: Metrics, more: Mapping[str, Any], source: str) -> Metrics:
    """Adds metrics in float32 and refuses names that are taken."""
    if taken := sorted(metrics.keys() & more.keys()):
        raise ValueError(
            f"{source} returns metrics named {taken}: these names are taken; rename them"
        )
    return metrics | {name: jnp.asarray(value, jnp.float32) for name, value in more.items()}


def _loss_and_metrics(loss_fn: LossFn, precision: Precision) -> Callable:
    """Wraps the loss: casts inputs to the compute dtype, returns float32 loss and metrics."""

    def wrapped(params, batch, key):
        loss, aux = loss_fn(_cast(params, precision.compute), _cast(batch, precision.compute), key)
        loss = jnp.asarray(loss, jnp.float32)
        if loss.shape:
            raise ValueError(f"loss_fn returned a loss of shape {loss.shape}; expected a scalar")
        return loss, _with_metrics({"loss": loss}, aux, "loss_fn")

    return wrapped


def _micro_batches(batch: PyTree, num: int) -> PyTree:
    """Splits rows: micro-batch i holds rows i::num, stacked along a new first axis."""

    def split(leaf):
        rows = leaf.shape[0] if leaf.ndim else 0
        if rows == 0 or rows % num:
            raise ValueError(
                f"a batch of {rows} rows cannot be split into {num} micro-batches of equal size; "
                f"make the batch size a multiple of grad_accumulation={num}"
            )
        # Rows i::num rather than blocks: a batch sharded by rows then needs no communication.
        return jnp.moveaxis(leaf.reshape(rows // num, num, *leaf.shape[1:]), 1, 0)

    return jax.tree.map(split, batch)


def init_state(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    key: PRNGKeyArray,
    *,
    precision: Precision = Precision(),
) -> TrainState:
    """Builds the state before the first step.

    Args:
      params: tree of parameters; floating-point leaves are cast to ``precision.params``.
      optimizer: optax gradient transformation.
      key: typed PRNG key (``jax.random.key``) from which all randomness of the run comes.
      precision: mixed-precision policy, the same as for ``make_train_step``.

    Returns:
      The state at step 0.

    Raises:
      TypeError: if ``key`` is not a typed PRNG key.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"key has dtype {key.dtype}; expected a typed key from jax.random.key(seed)"
        )
    params = _cast(params, precision.params)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), key)


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    grad_accumulation: int = 1,
    precision: Precision = Precision(),
    state_metrics: Callable[[TrainState], Mapping[str, Any]] | None = None,
) -> Callable[[TrainState, PyTree], tuple[TrainState, Metrics]]:
    """Builds one training step.

    The step is pure and not jitted: jit it, vmap it over a population of states, scan it.

    Args:
      loss_fn: ``(params, batch, key) -> (scalar loss, dict of metrics)``. The loss has to be a mean
        over the rows of the batch for gradient accumulation to mean the same as a large batch.
      optimizer: optax gradient transformation.
      grad_accumulation: number A >= 1 of micro-batches, run one after another. Micro-batch i takes
        rows i::A of every batch leaf and a key of its own; gradients and metrics are averaged in
        float32.
      precision: mixed-precision policy. Gradients reach the optimizer in the dtype of the
        parameters.
      state_metrics: optional function of the new state whose entries join the metrics.

    Returns:
      ``step(state, batch) -> (state, metrics)`` with metrics in float32: "loss", "grad_norm"
      (before the optimizer sees the gradient), the entries of ``loss_fn`` and ``state_metrics``.

    Raises:
      ValueError: if ``grad_accumulation`` < 1; when the step is traced, if the rows of the batch do
        not divide by it, if the loss is not a scalar, or if two metrics have the same name.
    """
    if grad_accumulation < 1:
        raise ValueError(f"grad_accumulation is {grad_accumulation}; expected 1 or more")
    value_and_grad = jax.value_and_grad(_loss_and_metrics(loss_fn, precision), has_aux=True)

    def metrics_and_grads(params, batch, key):
        (_, metrics), grads = value_and_grad(params, batch, key)
        return metrics, _at_least_f32(grads)

    def averaged(params, batch, key):
        micro_batches = _micro_batches(batch, grad_accumulation)
        keys = jax.random.split(key, grad_accumulation)

        def add(total, inputs):
            return jax.tree.map(jnp.add, total, metrics_and_grads(params, *inputs)), None

        first = jax.tree.map(lambda leaf: leaf[0], (micro_batches, keys))
        shapes = jax.eval_shape(metrics_and_grads, params, *first)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        total, _ = jax.lax.scan(add, zeros, (micro_batches, keys))
        return jax.tree.map(lambda leaf: leaf / grad_accumulation, total)

    gradient = metrics_and_grads if grad_accumulation == 1 else averaged

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        metrics, grads = gradient(state.params, batch, jax.random.fold_in(state.key, state.step))
        metrics = _with_metrics(metrics, {"grad_norm": optax.tree.norm(grads)}, "loss_fn")
        grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = TrainState(state.step + 1, params, opt_state, state.key)
        if state_metrics is not None:
            metrics = _with_metrics(metrics, state_metrics(state), "state_metrics")
        return state, metrics

    return step


def make_eval_step(
    loss_fn: LossFn, *, precision: Precision = Precision()
) -> Callable[[PyTree, PyTree, PRNGKeyArray], Metrics]:
    """Builds an evaluation step, not jitted.

    Args:
      loss_fn: ``(params, batch, key) -> (scalar loss, dict of metrics)``.
      precision: mixed-precision policy.

    Returns:
      ``evaluate(params, batch, key) -> metrics`` in float32: "loss" and the entries of ``loss_fn``.
    """
    evaluate = _loss_and_metrics(loss_fn, precision)
    return lambda params, batch, key: evaluate(params, batch, key)[1]
