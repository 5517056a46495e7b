"""What a dry run prints of a training step: arithmetic, and memory on each device."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from icmljax.training import mesh
from icmljax.training.state import TrainState


def step_sizes(
    step: jax.stages.Wrapped, abstract: TrainState, shardings: TrainState, batch: PyTree
) -> dict[str, str]:
    """Compiles a step from shapes alone.

    Args:
      step: of `icmljax.training.mesh.jit_step`.
      abstract: shapes of the state.
      shardings: of the state.
      batch: tree of `jax.ShapeDtypeStruct` with shardings.

    Returns:
      Columns of a table: megabytes on each device for parameters, optimizer state, temporaries.
    """
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
    )
    compiled = step.lower(placed, batch).compile()
    sizes = mesh.memory_report(compiled, abstract, shardings)
    return {f"{key} MB/device": f"{size / 1e6:,.1f}" for key, size in sizes.items()}


def count_parameters(params: PyTree) -> int:
    """Number of elements in a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def count_flops(function: Callable[..., Any], *args: Any) -> int:
    """Floating-point operations of the matrix products and convolutions in a function.

    A multiplication and an addition are two. Loops count as often as they run (``while`` loops, of
    unknown length, once); of several branches the most expensive one counts.

    Args:
      function: traceable by JAX.
      *args: its arguments, or their shapes.
    """
    return _jaxpr_flops(jax.make_jaxpr(function)(*args).jaxpr)


def _jaxpr_flops(jaxpr: Any) -> int:
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: Any) -> int:
    params = equation.params
    match equation.primitive.name:
        case "dot_general":
            (contracting, _), _ = params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            return 2 * _size(equation.outvars[0]) * math.prod(shape[axis] for axis in contracting)
        case "conv_general_dilated":
            # Every output element is a sum over the kernel's taps and input channels.
            kernel = equation.invars[1]
            outputs = kernel.aval.shape[params["dimension_numbers"].rhs_spec[0]]
            return 2 * _size(equation.outvars[0]) * _size(kernel) // outputs
        case "scan":
            return params["length"] * _jaxpr_flops(params["jaxpr"].jaxpr)
        case "cond":
            return max(_jaxpr_flops(branch.jaxpr) for branch in params["branches"])
    return sum(_jaxpr_flops(inner) for inner in _inner(params.values()))


def _inner(values: Any) -> Sequence[Any]:
    """The programs among the parameters of an equation: of jit, of custom derivatives, ..."""
    found = []
    for value in values:
        if hasattr(value, "eqns"):
            found.append(value)
        elif hasattr(value, "jaxpr"):
            found.append(value.jaxpr)
    return found


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)
