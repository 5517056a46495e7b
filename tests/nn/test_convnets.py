"""Tests of the convolutional networks: icmljax.nn.{cnn,convolution,norm,resnet,...}."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from icmljax.nn.cnn import PlainCNN
from icmljax.nn.convolution import convolve
from icmljax.nn.efficientnet import EfficientNet, EfficientNetConfig, Stage, b0, small
from icmljax.nn.norm import ConvNorm, batch_statistics
from icmljax.nn.resnet import CifarResNet
from icmljax.nn.vgg import VGG16

TINY_RESNET = CifarResNet(14, width=4)
TINY_STAGES = (Stage(8, expansion=1), Stage(12, 2, stride=2, size=5, expansion=2))
TINY_CONFIG = EfficientNetConfig(TINY_STAGES, stem_channels=8, head_channels=16)
TINY_EFFICIENT = EfficientNet(TINY_CONFIG)


def _images(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def _params(model, images):
    """Random parameters in which every term shows; drawn without compiling anything."""
    train = {} if isinstance(model, PlainCNN) else {"train": False}
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), images, **train))["params"]
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        fan_in = np.prod(leaf.shape[-4:-1]) if path[-1].key == "kernel" else 4
        offset = path[-1].key == "scale"
        return np.float32(rng.normal(size=leaf.shape) / np.sqrt(fan_in) + offset)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(model, params, stats, images):
    return model.apply({"params": params, "batch_stats": stats}, images, train=False)


@functools.partial(jax.jit, static_argnums=0)
def _train(model, params, images):
    """Logits, new running averages, and gradients of the parameters and the images."""

    def loss(params, images):
        logits, updates = model.apply(
            {"params": params}, images, train=True, mutable=["batch_stats"]
        )
        return jnp.sum(jnp.sin(logits)), (logits, updates["batch_stats"])

    gradients, (logits, stats) = jax.grad(loss, (0, 1), has_aux=True)(params, images)
    return logits, stats, *gradients


def _num_parameters(model, *shape, **kwargs):
    variables = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, *shape)), **kwargs)
    )
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


def _assert_all_nonzero(gradients):
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(leaf).all() and np.any(leaf), jax.tree_util.keystr(path)


# Sizes


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        # He et al., table 6: 0.27, 0.46, 0.85, 1.7 million.
        (CifarResNet(20), (32, 32, 3), 269_722),
        (CifarResNet(32), (32, 32, 3), 464_154),
        (CifarResNet(56), (32, 32, 3), 853_018),
        (CifarResNet(110), (32, 32, 3), 1_727_962),
        # 14,728,266 with biases before the norms, which cancel there.
        (VGG16(), (32, 32, 3), 14_728_266 - 4224),
        # torchvision.models.efficientnet_b0.
        (EfficientNet(b0(), 1000), (224, 224, 3), 5_288_548),
    ],
)
def test_number_of_parameters(model, shape, expected):
    assert _num_parameters(model, *shape, train=False) == expected


def test_number_of_parameters_of_a_plain_cnn():
    convolutions = 9 * 128 * 3 + (2 + 994) * 9 * 128**2 + 997 * 128
    assert _num_parameters(PlainCNN(1000), 32, 32, 3) == convolutions + 4 * 4 * 128 * 10 + 10


# The plain CNN


def _circular_conv(images, kernel, bias, stride=1):
    """By shifts of the whole image, in float64."""
    images, kernel = np.float64(images), np.float64(kernel)
    outputs = sum(
        np.roll(images, (1 - i, 1 - j), (1, 2)) @ kernel[i, j] for i in range(3) for j in range(3)
    )
    return outputs[:, ::stride, ::stride] + bias


def test_plain_cnn_is_a_chain_of_its_convolutions():
    model = PlainCNN(9, channels=5, num_classes=4)
    images = _images(2, 16, 8, 3)
    p = _params(model, images)
    assert p["hidden"]["kernel"].shape == (3, 3, 3, 5, 5)
    hidden = images
    for name, stride in (("input", 1), ("halve_1", 2), ("halve_2", 2)):
        hidden = np.tanh(_circular_conv(hidden, **p[name], stride=stride))
    for kernel, bias in zip(p["hidden"]["kernel"], p["hidden"]["bias"], strict=True):
        hidden = np.tanh(_circular_conv(hidden, kernel, bias))
    pooled = hidden.reshape(2, 2, 2, 1, 2, 5).mean((2, 4)).reshape(2, -1)
    expected = pooled @ p["output"]["kernel"] + p["output"]["bias"]
    np.testing.assert_allclose(
        jax.jit(model.apply)({"params": p}, images), expected, rtol=1e-4, atol=1e-5
    )


def test_deep_plain_cnn_passes_the_gradient_on():
    """With identities for weights and no activation nothing grows or shrinks on the way."""
    model = PlainCNN(300, 4, 2, lambda x: x)
    images = _images(1, 8, 8, 3)
    params = _params(model, images)
    kernel = np.zeros_like(params["hidden"]["kernel"])
    kernel[:, 1, 1] = np.eye(4)
    params["hidden"]["kernel"] = kernel
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(model.apply({"params": p}, images))))
    norms = np.linalg.norm(gradient(params)["hidden"]["bias"], axis=1)
    assert len(norms) == 294 and norms[-1] > 0.1
    np.testing.assert_allclose(norms, norms[-1], rtol=1e-3)


# Convolutions on CPUs


@pytest.mark.parametrize(
    ("size", "stride", "groups", "padding"),
    [(3, 1, 1, "VALID"), (3, 2, 1, "SAME"), (3, 1, 6, [(1, 1)] * 2), (5, 2, 6, [(2, 2)] * 2)],
)
def test_convolution_by_shifts(size, stride, groups, padding):
    """What CPUs run against what the others run, gradients too."""
    inputs = _images(2, 7, 8, 6)
    kernel = _images(size, size, 6 // groups, 6 if groups > 1 else 4, seed=1)
    options = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups)

    @functools.partial(jax.jit, static_argnums=0)
    def results(convolve, inputs, kernel):
        def loss(inputs, kernel):
            outputs = convolve(inputs, kernel, (stride, stride), padding, **options)
            return jnp.sum(jnp.sin(outputs)), outputs

        gradients, outputs = jax.grad(loss, (0, 1), has_aux=True)(inputs, kernel)
        return outputs, *gradients

    actual = results(convolve, inputs, kernel)
    expected = results(jax.lax.conv_general_dilated, inputs, kernel)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_scanned_convolutions_on_other_platforms_are_xla_s_and_keep_their_inputs_only():
    x = jax.ShapeDtypeStruct((4, 8, 8, 6), jnp.float32)
    kernels = jax.ShapeDtypeStruct((5, 3, 3, 6, 6), jnp.float32)

    def layers(x, kernels):
        def layer(x, kernel):
            options = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return convolve(x, kernel, (1, 1), "SAME", **options), None

        return jax.lax.scan(layer, x, kernels)[0]

    traced = jax.jit(jax.grad(lambda x, kernels: jnp.sum(layers(x, kernels)), 1)).trace(x, kernels)
    cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "stablehlo.convolution" not in cpu and "stablehlo.convolution" in tpu
    assert "stablehlo.dot_general" in cpu and "stablehlo.dot_general" not in tpu
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(layers, *args)[1], x, kernels))
    assert sum(leaf.size for leaf in kept) <= 5 * x.size + kernels.size + 5


# Batch normalisation


def test_batch_statistics_are_those_of_all_images():
    """Of the first layer exactly; its input does not depend on other statistics."""
    model = ConvNorm(6)
    images = _images(24, 8, 8, 3) * 2 + 1
    params = _params(model, images)
    stats = batch_statistics(model, params, np.split(np.asarray(images), 3))["norm"]
    outputs = nn.Conv(6, (3, 3), use_bias=False).apply({"params": params["conv"]}, images)
    np.testing.assert_allclose(stats["mean"], outputs.mean((0, 1, 2)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stats["var"], outputs.var((0, 1, 2)), rtol=1e-4)


def test_evaluation_with_the_statistics_of_the_batch_is_training():
    images = _images(8, 16, 16, 3)
    params = _params(TINY_RESNET, images)
    stats = batch_statistics(TINY_RESNET, params, [images])
    logits = _evaluate(TINY_RESNET, params, stats, images)
    expected, running, *_ = _train(TINY_RESNET, params, images)
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-4)
    # In every layer the running averages have moved from 0 and 1 by a tenth of the way.
    for (path, moved), target in zip(
        jax.tree_util.tree_leaves_with_path(running), jax.tree.leaves(stats), strict=True
    ):
        expected = 0.9 * (path[-1].key == "var") + 0.1 * target
        np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-4)


def test_statistics_are_of_the_whole_batch_on_a_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    images = _images(16, 8, 8, 3) + jnp.arange(16.0)[:, None, None, None]
    model = ConvNorm(4)
    params = _params(model, images)
    sharded = jax.device_put(images, NamedSharding(mesh, P("data")))
    for actual, expected in zip(
        jax.tree.leaves(_train(model, params, sharded)),
        jax.tree.leaves(_train(model, params, images)),
        strict=True,
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


# The residual network


def _conv_norm(hidden, params, stride=1):
    """Normalised by the batch, in float64."""
    kernel = np.float64(params["conv"]["kernel"])
    size = len(kernel)
    height, width = hidden.shape[1:3]
    padded = np.pad(hidden, ((0, 0), *[(size // 2, size // 2)] * 2, (0, 0)))
    outputs = sum(
        padded[:, i : i + height, j : j + width] @ kernel[i, j]
        for i in range(size)
        for j in range(size)
    )[:, ::stride, ::stride]
    deviation = np.sqrt(outputs.var((0, 1, 2)) + 1e-5)
    normed = (outputs - outputs.mean((0, 1, 2))) / deviation
    return normed * params["norm"]["scale"] + params["norm"]["bias"]


def test_resnet_is_its_blocks_one_after_another():
    """Scanned blocks included: the reference loops over the first axis of their parameters."""
    images = _images(8, 16, 16, 3)
    params = _params(TINY_RESNET, images)

    def block(hidden, params, stride=1):
        inner = np.maximum(_conv_norm(hidden, params["conv_1"], stride), 0)
        missing = len(params["conv_2"]["norm"]["bias"]) - hidden.shape[-1]
        shortcut = np.pad(
            hidden[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (missing // 2, missing // 2))
        )
        return np.maximum(shortcut + _conv_norm(inner, params["conv_2"]), 0)

    hidden = np.maximum(_conv_norm(np.float64(images), params["input"]), 0)
    for stage, equal in ((1, 2), (2, 1), (3, 1)):
        if stage > 1:
            hidden = block(hidden, params[f"halve_{stage}"], stride=2)
        for index in range(equal):
            hidden = block(
                hidden, jax.tree.map(lambda p, index=index: p[index], params[f"stage_{stage}"])
            )
    expected = hidden.mean((1, 2)) @ params["output"]["kernel"] + params["output"]["bias"]
    logits, stats, *gradients = _train(TINY_RESNET, params, images)
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
    assert stats["stage_1"]["conv_1"]["norm"]["mean"].shape == (2, 4)
    _assert_all_nonzero(gradients)


# VGG


def test_vgg():
    """Shapes of its feature maps; a pass is left to the smaller networks."""
    model = VGG16()
    options = dict(train=True, capture_intermediates=True, mutable=True)
    logits, variables = jax.eval_shape(
        lambda: model.init_with_output(jax.random.key(0), jnp.zeros((2, 32, 32, 3)), **options)
    )
    assert logits.shape == (2, 10) and logits.dtype == jnp.float32
    maps = [
        captured["__call__"][0].shape[1:]
        for name, captured in variables["intermediates"].items()
        if name.startswith("conv")
    ]
    repeats = (2, 2, 3, 3, 3)
    sizes = [(32, 32, 64), (16, 16, 128), (8, 8, 256), (4, 4, 512), (2, 2, 512)]
    assert maps == [size for size, n in zip(sizes, repeats, strict=True) for _ in range(n)]


# EfficientNet


def test_efficientnet_is_its_blocks_one_after_another():
    images = _images(4, 8, 8, 3)
    params = _params(TINY_EFFICIENT, images)

    def relu(x):
        return np.maximum(x, 0)

    def dense(x, params):
        return x @ params["kernel"] + params["bias"]

    def block(inputs, params, stride):
        hidden = inputs
        if "expand" in params:
            hidden = relu(_conv_norm(hidden, params["expand"]))
        # A depthwise kernel is a diagonal one.
        kernel = params["depthwise"]["conv"]["kernel"] * np.eye(hidden.shape[-1])
        depthwise = params["depthwise"] | {"conv": {"kernel": kernel}}
        hidden = relu(_conv_norm(hidden, depthwise, stride))
        squeezed = relu(dense(hidden.mean((1, 2)), params["squeeze"]))
        hidden = hidden / (1 + np.exp(-dense(squeezed, params["excite"])))[:, None, None]
        hidden = _conv_norm(hidden, params["contract"])
        return inputs + hidden if hidden.shape == inputs.shape else hidden

    hidden = relu(_conv_norm(np.float64(images), params["stem"], stride=2))
    for name, stride in (("1_1", 1), ("2_1", 2), ("2_2", 1)):
        hidden = block(hidden, params[f"block_{name}"], stride)
    hidden = relu(_conv_norm(hidden, params["head"]))
    expected = dense(hidden.mean((1, 2)), params["output"])
    logits, _, *gradients = _train(TINY_EFFICIENT, params, images)
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
    _assert_all_nonzero(gradients)


def test_dropout_and_stochastic_depth_act_in_training_only():
    def output(key, train, **rates):
        model = EfficientNet(dataclasses.replace(TINY_CONFIG, **rates))
        variables = {"params": params, "batch_stats": stats}
        logits, _ = model.apply(
            variables, images, train=train, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        return logits

    output = jax.jit(output, static_argnames=("train", "dropout", "stochastic_depth"))
    images = _images(4, 8, 8, 3)
    params = _params(TINY_EFFICIENT, images)
    _, stats, *_ = _train(TINY_EFFICIENT, params, images)
    keys = jax.random.split(jax.random.key(0), 2)
    for rates in ({"dropout": 0.5}, {"stochastic_depth": 0.9}):
        first, second = (output(key, True, **rates) for key in keys)
        assert not np.allclose(first, second)
        np.testing.assert_array_equal(output(keys[0], False, **rates), output(keys[1], False))


def test_configurations_fit_small_images():
    for config, shape in ((small(), (28, 28, 1)), (b0(stem_stride=1), (64, 64, 3))):
        model = EfficientNet(config, 200)
        logits, _ = jax.eval_shape(
            lambda m=model, s=shape: m.init_with_output(
                jax.random.key(0), jnp.zeros((2, *s)), train=True
            )
        )
        assert logits.shape == (2, 200)
    assert _num_parameters(EfficientNet(small()), 28, 28, 1, train=False) < 50_000
    assert b0(stem_stride=1).stem_stride == 1


# All


@pytest.mark.parametrize("model", [TINY_RESNET, VGG16(), TINY_EFFICIENT])
def test_bfloat16(model):
    """All layers but the last; parameters, statistics and logits stay float32."""
    model = model.clone(dtype=jnp.bfloat16)
    options = dict(train=True, capture_intermediates=True, mutable=True)
    logits, variables = jax.eval_shape(
        lambda: model.init_with_output(jax.random.key(0), jnp.zeros((2, 32, 32, 3)), **options)
    )
    types = jax.tree_util.tree_leaves_with_path(
        jax.tree.map(lambda leaf: leaf.dtype.name, variables.pop("intermediates"))
    )
    for path, dtype in types:
        inside = "output" not in jax.tree_util.keystr(path) and len(path) > 2
        assert dtype == ("bfloat16" if inside else "float32"), jax.tree_util.keystr(path)
    assert len(types) > 15 and logits.dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"float32"}


# Bad input


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (PlainCNN(6), (8, 8, 3), "depth must be at least 7, got 6"),
        (PlainCNN(9), (28, 28, 1), "images of 28 x 28 pixels cannot be halved three times"),
        (CifarResNet(33), (32, 32, 3), r"depth must be 6 n \+ 2 .*, got 33"),
        (CifarResNet(2), (32, 32, 3), "got 2"),
        (VGG16(), (28, 28, 1), "images of 28 x 28 pixels cannot be halved five times"),
    ],
)
def test_depths_and_sizes_that_do_not_fit(model, shape, message):
    with pytest.raises(ValueError, match=message):
        _num_parameters(model, *shape, **({} if isinstance(model, PlainCNN) else {"train": True}))


@pytest.mark.bad_input
def test_bad_configurations():
    with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\), got 1"):
        b0(dropout=1)
    with pytest.raises(ValueError, match=r"stochastic_depth must lie in \[0, 1\), got -0.1"):
        small(stochastic_depth=-0.1)
    with pytest.raises(ValueError, match="every stage needs a block"):
        EfficientNetConfig((Stage(8, 0),))
    with pytest.raises(ValueError, match="every stage needs a block"):
        EfficientNetConfig(())


@pytest.mark.bad_input
def test_statistics_need_a_batch():
    with pytest.raises(ValueError, match="got no batches"):
        batch_statistics(TINY_RESNET, {}, [])
