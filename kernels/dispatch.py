"""Which implementation of a kernel runs where."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

Implementation = Literal["xla", "pallas"]


def choose(
    implementation: Implementation | None,
    dtype: Any,
    arguments: tuple[Any, ...],
    *,
    plain: Callable[..., Any],
    tpu: Callable[..., Any],
    gpu: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
) -> Any:
    """Runs the function of ``arguments`` that ``implementation`` stands for.

    Args:
      implementation: "xla"; "pallas" (TPU and GPU, float32); or None: Pallas where the platform
        that is lowered for has it and XLA elsewhere.
      dtype: what the kernel computes in.
      arguments: trees of arrays.
      plain: the XLA function. Arrays that the compiler partitions over a mesh always take it: the
        compiler cannot partition a Pallas call. Inside ``shard_map`` it need not.
      tpu: the Pallas function for TPUs.
      gpu: the Pallas function for GPUs.
      cpu: an XLA function that is faster than ``plain`` on a CPU, if there is one.

    Returns:
      What the function returns.

    Raises:
      ValueError: unknown implementation, or Pallas asked for in another dtype than float32.
    """
    if implementation not in (None, "xla", "pallas"):
        raise ValueError(
            f"implementation is {implementation!r}; expected 'xla', 'pallas' or None (automatic)"
        )
    if implementation == "pallas" and dtype != jnp.float32:
        raise ValueError(
            f"the Pallas kernels compute in float32, and these arrays need {dtype}; "
            "use implementation=None or 'xla'"
        )
    if implementation == "pallas":
        return lax.platform_dependent(*arguments, tpu=tpu, cuda=gpu)
    if any(map(_is_partitioned, jax.tree.leaves(arguments))):
        return plain(*arguments)
    branches = {} if cpu is None else dict(cpu=cpu)
    if implementation is None and dtype == jnp.float32:
        branches |= dict(tpu=tpu, cuda=gpu)
    if not branches:
        return plain(*arguments)
    return lax.platform_dependent(*arguments, **branches, default=plain)


def _is_partitioned(x: jax.Array) -> bool:
    """Whether the compiler divides this array over a mesh of several devices."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or mesh.size == 1:
        return False
    return any(kind != jax.sharding.AxisType.Manual for kind in mesh.axis_types)
