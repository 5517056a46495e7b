"""Singular values of the input-output Jacobian at the start, over densities."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from icmljax.data.images import ImageSplits, normalize
from icmljax.experiments.common import app, report
from icmljax.experiments.eoi import networks
from icmljax.initializers import eoi


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """A narrow network, its activations, densities and initializations."""

    densities: tuple[float, ...] = (0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)
    activations: tuple[str, ...] = ("linear", "tanh", "hard_tanh", "relu")
    inits: tuple[str, ...] = ("eoi", "ai", "masked", "dense")
    depth: int = 7
    width: int = 100
    ai_steps: int = 10_000
    num_images: int = 16


def run_spectrum(
    context: app.Context[Any], init: str, part: Spectrum, data: ImageSplits
) -> dict[str, Any]:
    """One arm, by activation and density: mean singular value of each seed, largest |value - 1|."""
    images = data.test_images[: part.num_images]
    at = normalize(images, data.mean, data.std).reshape(len(images), -1)
    keys = jax.vmap(jax.random.key)(jnp.arange(context.config.seeds))
    networks_by_name = {
        name: networks.make_network("mlp", part.depth, part.width, name, data.num_classes)
        for name in part.activations
    }

    @jax.jit
    @jax.vmap
    def spectra(params):
        return {
            name: eoi.jacobian_spectrum(functools.partial(networks.forward, network), params, at)
            for name, network in networks_by_name.items()
        }

    result: dict[str, Any] = {}
    for density in part.densities:
        params = _weights(part, init, density, at.shape[1], data.num_classes, keys)
        for name, values in jax.device_get(spectra(params)).items():
            found = result.setdefault(name, {"mean": [], "error": []})
            found["mean"].append(values.mean((1, 2)).tolist())
            found["error"].append(float(np.abs(values - 1).max()))
    return result


def _weights(part: Spectrum, init: str, density: float, num_inputs: int, classes: int, keys):
    """Parameters for all seeds; they do not depend on the activation."""
    network = networks.make_network("mlp", part.depth, part.width, "linear", classes)

    def draw(key):
        params, _ = networks.default_variables(network, key, (num_inputs,))
        densities = networks.densities_by_shape(params, density)
        params, _ = networks.initialize(
            init, key, params, densities, sigma_w=1.0, sigma_b=0.0, ai_steps=part.ai_steps
        )
        return params

    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(draw, keys))


def spectrum_report(part: Spectrum, results: Mapping[str, dict[str, Any]]):
    """Rows, verdicts and plot panels: the mean singular value."""
    rows = []
    panels: dict[str, dict[str, report.Curve]] = {}
    for activation in part.activations:
        for init, values in results.items():
            by_density = np.asarray(values[activation]["mean"])
            row: dict[str, Any] = {"activation": activation, "initialization": init}
            for density, seeds in zip(part.densities, by_density, strict=True):
                row[f"{density:g}"] = report.mean_and_standard_error(seeds)
            rows.append(row)
            label = f"mean singular value, {activation}"
            panels.setdefault(label, {})[init] = report.Curve(part.densities, by_density)
    verdicts = []
    if "eoi" in results and "linear" in part.activations:
        error = max(results["eoi"]["linear"]["error"])
        bar = "spectrum: all singular values of EOI are 1 in the linear network, to 1e-5"
        verdicts.append(report.Verdict(bar, f"{error:.1e}", error < 1e-5))
    if {"eoi", "ai", "masked"} <= results.keys() and "tanh" in part.activations:
        low = [i for i, density in enumerate(part.densities) if density <= 0.1]
        means = {n: np.mean(r["tanh"]["mean"], axis=-1) for n, r in results.items()}
        ordered = all(means["eoi"][i] > means["ai"][i] > means["masked"][i] for i in low)
        shown = "; ".join(
            f"{part.densities[i]:g}: "
            + " > ".join(f"{means[n][i]:.3g}" for n in ("eoi", "ai", "masked"))
            for i in low
        )
        bar = "spectrum: EOI > AI > masked in the tanh network, densities <= 0.1"
        verdicts.append(report.Verdict(bar, shown, ordered))
    return rows, verdicts, panels
