"""The networks of the paper, and the ways to initialise them."""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from icmljax.initializers import eoi
from icmljax.nn.cnn import PlainCNN
from icmljax.nn.efficientnet import EfficientNet, b0, small
from icmljax.nn.mlp import DeepMLP
from icmljax.nn.resnet import CifarResNet
from icmljax.nn.vgg import VGG16
from icmljax.sparsity.densities import layer_densities
from icmljax.sparsity.masks import densities_of

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "linear": lambda x: x,
    "tanh": jnp.tanh,
    "hard_tanh": jax.nn.hard_tanh,
    "relu": jax.nn.relu,
    "lrelu": jax.nn.leaky_relu,
    "selu": jax.nn.selu,
}
SHAPE_METHODS = ("uniform", "erk")  # densities that follow from shapes alone
DENSITY_METHODS = (*SHAPE_METHODS, "snip", "grasp", "synflow")
# How weights are drawn. "dense" is orthogonal, without a mask; "masked" is that times a random
# mask; "ai" starts there and goes towards isometry; "default" is PyTorch's, times a random mask;
# "eoi-official" has the authors' rule for groups, "eoi-tap" a random tap for each group.
INITS = (
    "dense",
    "masked",
    "ai",
    "sao",
    "default",
    "eoi",
    "eoi-matching",
    "eoi-official",
    "eoi-tap",
)


def make_network(name: str, depth: int, width: int, activation: str, classes: int) -> nn.Module:
    """A network by name; `depth` and `width` where it has a choice.

    Raises:
      ValueError: there is no such network or activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; there are: {', '.join(ACTIVATIONS)}")
    function = ACTIVATIONS[activation]
    makers: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: DeepMLP(depth, width, classes, function),
        "cnn": lambda: PlainCNN(depth, width, classes, function),
        "resnet": lambda: CifarResNet(depth, classes, function),
        "vgg16": lambda: VGG16(classes, function),
        "efficientnet_b0": lambda: EfficientNet(b0(), classes, function),
        "separable": lambda: EfficientNet(small(), classes, function),
    }
    if name not in makers:
        raise ValueError(f"unknown network {name!r}; there are: {', '.join(makers)}")
    return makers[name]()


def has_norm(network: nn.Module) -> bool:
    """Whether it normalises by batch statistics (and is called with ``train=``)."""
    return not isinstance(network, DeepMLP | PlainCNN)


def forward(network: nn.Module, params: PyTree, images: Array, statistics: PyTree = None) -> Array:
    """Logits; by the batch's own statistics where none are given."""
    if not has_norm(network):
        return jnp.asarray(network.apply({"params": params}, images))
    if statistics is not None:
        variables = {"params": params, "batch_stats": statistics}
        return jnp.asarray(network.apply(variables, images, train=False))
    outputs: Any = network.apply({"params": params}, images, train=True, mutable=["batch_stats"])
    return outputs[0]


@functools.partial(jax.jit, static_argnums=(0, 2))
def default_variables(network: nn.Module, key: PRNGKeyArray, shape: tuple[int, ...]) -> Any:
    """Parameters as flax draws them, and statistics of mean 0 and variance 1 (None without).

    Args:
      network: it.
      key: PRNG key.
      shape: of one input.
    """
    options: dict[str, Any] = {"train": False} if has_norm(network) else {}
    variables = network.init(key, jnp.zeros((1, *shape)), **options)
    return variables["params"], variables.get("batch_stats")


def is_kernel(path: str, leaf: Any) -> bool:
    """What is made sparse: the weights of dense layers and convolutions."""
    del leaf
    return path.rpartition("/")[2] == "kernel"


def num_stacked(path: str, leaf: Any) -> int:
    """Kernels of scanned layers have one axis more."""
    return 1 if is_kernel(path, leaf) and len(leaf.shape) in (3, 5) else 0


def layout_of(path: str, leaf: Any) -> eoi.Layout:
    """Axes of the kernels in these networks."""
    groups = leaf.shape[-1] if "depthwise" in path else 1
    batch = tuple(range(num_stacked(path, leaf)))
    return eoi.Layout(batch_axis=batch, feature_group_count=groups)


def official_layout_of(path: str, leaf: Any) -> eoi.Layout:
    """As the authors' code has it: a depthwise kernel is one matrix with one input."""
    return eoi.Layout(batch_axis=tuple(range(num_stacked(path, leaf))))


def kaiming_with_mask(density, scale=1.0, **layout):
    """PyTorch's default weights, uniform in ``±1/sqrt(fan_in)``, times a random mask."""
    del scale
    masked = eoi.masked_orthogonal_with_mask(density, **layout)

    def init(key, shape, dtype=jnp.float32):
        weight_key, mask_key = jax.random.split(key)
        _, mask = masked(mask_key, shape, dtype)
        fan_in = math.prod(shape) // (shape[-1] * math.prod(shape[i] for i in layout["batch_axis"]))
        weights = jax.random.uniform(weight_key, shape, dtype, -1, 1) / math.sqrt(fan_in)
        return jnp.where(mask, weights, 0), mask

    return init


def densities_by_shape(shapes: PyTree, density: float, method: Any = "uniform") -> PyTree:
    """Densities that follow from the shapes."""
    return layer_densities(shapes, density, method, filter_fn=is_kernel, stacked=num_stacked)


def initialize(
    init: str,
    key: PRNGKeyArray,
    params: PyTree,
    densities: PyTree,
    *,
    sigma_w: float,
    sigma_b: float,
    split: Any = "more",
    ai_steps: int = 10_000,
) -> tuple[PyTree, PyTree]:
    """Draws all weights and biases in one of the ways of `INITS`.

    Args:
      init: the way.
      key: PRNG key.
      params: tree of parameters to replace.
      densities: tree of the kernels' densities, see `eoi.reinit_tree`.
      sigma_w: gain.
      sigma_b: standard deviation of the biases.
      split: of EOI's convolutions.
      ai_steps: steps of approximate isometry.

    Returns:
      Parameters and masks.

    Raises:
      ValueError: there is no such way.
    """
    exact = functools.partial(eoi.delta_orthogonal_with_mask, split=split)
    factories: dict[str, Callable[..., Any]] = {
        "dense": eoi.masked_orthogonal_with_mask,
        "masked": eoi.masked_orthogonal_with_mask,
        "ai": eoi.masked_orthogonal_with_mask,
        "sao": eoi.sao_with_mask,
        "default": kaiming_with_mask,
        "eoi": exact,
        "eoi-matching": functools.partial(exact, scheme="matching"),
        "eoi-official": exact,
        "eoi-tap": functools.partial(exact, tap="random"),
    }
    if init not in factories:
        raise ValueError(f"unknown initialization {init!r}; there are: {', '.join(factories)}")
    layout = official_layout_of if init == "eoi-official" else layout_of
    if init == "dense":
        densities = jax.tree.map(lambda d: 1.0 if np.ndim(d) == 0 else np.ones_like(d), densities)
    if init.startswith("eoi"):
        densities = eoi.feasible_densities(params, densities, layout_of=layout)
    params, masks = eoi.reinit_tree(
        key, params, densities, sigma_w, sigma_b, layout_of=layout, factory=factories[init]
    )
    if init == "ai":
        params = eoi.approximate_isometry(
            params, masks, sigma_w=sigma_w, steps=ai_steps, layout_of=layout
        )
    return params, masks


def densities_of_masks(params: PyTree, masks: PyTree) -> PyTree:
    """Realised densities, one for each of stacked layers."""
    return densities_of(params, masks, stacked=num_stacked)
