"""Exact Orthogonal Initialization: weights that are orthogonal and sparse at once, and their masks.

    init = eoi.orthogonal_with_mask(density=0.125)
    weights, mask = init(jax.random.key(0), (512, 512), jnp.float32)

    densities = layer_densities(params, 0.1, method="erk")  # icmljax.sparsity.densities
    params, masks = eoi.reinit_tree(key, params, densities, sigma_w=1.0247, sigma_b=0.00448)
    optimizer = masked(optax.sgd(1e-2, 0.9), masks)  # icmljax.sparsity.optimizer

Reference:
  A. I. Nowak, L. Gniecki, F. Szatkowski, J. Tabor, "Sparser, Better, Deeper, Stronger: Improving
  Static Sparse Training with Exact Orthogonal Initialization", ICML 2024, arXiv 2406.01755.
"""

from icmljax.initializers.eoi.baselines import (
    approximate_isometry,
    jacobian_spectrum,
    masked_orthogonal_with_mask,
    sao_with_mask,
)
from icmljax.initializers.eoi.initializers import (
    Layout,
    delta_orthogonal,
    delta_orthogonal_with_mask,
    orthogonal,
    orthogonal_with_mask,
    smallest_density,
)
from icmljax.initializers.eoi.rotations import (
    GivensPlan,
    apply_plan,
    expected_density,
    plan_rotations,
    rotations_for_density,
    row_count_distribution,
)
from icmljax.initializers.eoi.trees import (
    LayerReport,
    channels_first,
    channels_last,
    feasible_densities,
    reinit_tree,
    report,
)

__all__ = [
    "GivensPlan",
    "LayerReport",
    "Layout",
    "apply_plan",
    "approximate_isometry",
    "channels_first",
    "channels_last",
    "delta_orthogonal",
    "delta_orthogonal_with_mask",
    "expected_density",
    "feasible_densities",
    "jacobian_spectrum",
    "masked_orthogonal_with_mask",
    "orthogonal",
    "orthogonal_with_mask",
    "plan_rotations",
    "reinit_tree",
    "report",
    "rotations_for_density",
    "row_count_distribution",
    "sao_with_mask",
    "smallest_density",
]
