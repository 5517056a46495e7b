"""Training with a fixed mask: how much of the dense network's accuracy does it reach?"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PRNGKeyArray, PyTree

from icmljax.data import images as images_lib
from icmljax.data.batches import BatchIterator, shuffled_indices
from icmljax.data.digits import load_digits
from icmljax.experiments.common import app, report, sizes
from icmljax.experiments.eoi import networks
from icmljax.initializers import eoi
from icmljax.nn.norm import batch_statistics
from icmljax.sparsity import pruning
from icmljax.sparsity.masks import apply_masks
from icmljax.sparsity.optimizer import masked
from icmljax.training import loop, mesh, metrics, state


@dataclasses.dataclass(frozen=True)
class Training:
    """One network on one data set, initialised in several ways."""

    network: str
    data: str
    arms: tuple[str, ...]  # "eoi", "erk-eoi": method of the densities, way of `networks.INITS`
    learning_rate: float
    num_steps: int | None = None
    epochs: int | None = None  # instead of num_steps
    depth: int = 0
    width: int = 0
    activation: str = "relu"
    density: float = 0.125
    sigma_w: float = 1.0
    sigma_b: float = 0.0
    split: str = "more"
    weight_decay: float = 1e-4
    batch_size: int = 128
    ai_steps: int = 10_000
    augment: bool = False
    together: bool = False  # all seeds at once, on one device: for small networks
    spectrum: bool = False  # of the Jacobian at the start
    eval_batch_size: int = 500
    eval_every: int = 0
    checkpoint_every: int = 100


_SPECTRUM_IMAGES = 16
_STATISTICS_BATCHES = 20  # for batch normalisation at evaluation
DATA_SHAPES = {  # (height, width, channels), classes, training images
    "mnist5000": ((28, 28, 1), 10, 4000),
    "digits": ((8, 8, 1), 10, 1297),
    "mnist": ((28, 28, 1), 10, 60_000),
    "cifar10": ((32, 32, 3), 10, 50_000),
    "tiny-imagenet": ((64, 64, 3), 200, 100_000),
}


def load_data(context: app.Context[Any], name: str) -> images_lib.ImageSplits:
    """The data set, from ``--data_dir`` (or its subfolder of that name) where it is not offline.

    Raises:
      ValueError: a folder is needed, or holds something else.
      FileNotFoundError: files are missing.
    """
    if name == "mnist5000":
        return images_lib.load_mnist_5000()
    if name == "digits":
        return _digits()
    if context.data_dir is None:
        raise ValueError(f"{name} is read from files: give their folder as --data_dir")
    folder = context.data_dir / name
    folder = folder if folder.is_dir() else context.data_dir
    loaders: dict[str, Callable[[Any], images_lib.ImageSplits]] = {
        "mnist": images_lib.load_mnist,
        "cifar10": images_lib.load_cifar10,
        "tiny-imagenet": images_lib.load_image_folder,
    }
    data = loaders[name](folder)
    shape, classes, _ = DATA_SHAPES[name]
    if data.train_images.shape[1:] != shape or data.num_classes != classes:
        raise ValueError(
            f"{folder} has {data.num_classes} classes of images of {data.train_images.shape[1:]},"
            f" but {name} has {classes} of {shape}; give the folder of {name}"
        )
    return data


def _digits() -> images_lib.ImageSplits:
    """Scikit-learn's digits, whose pixels have 17 levels, as images."""
    digits = load_digits()
    train, test = (
        np.rint(255 * pixels).astype(np.uint8).reshape(-1, 8, 8, 1)
        for pixels in (digits.train_images, digits.test_images)
    )
    mean, std = (np.asarray([f(digits.train_images)], np.float32) for f in (np.mean, np.std))
    return images_lib.ImageSplits(
        train, digits.train_labels, test, digits.test_labels, 10, mean, std
    )


def num_steps(part: Training, num_images: int) -> int:
    """How long to train."""
    if part.num_steps is not None:
        return part.num_steps
    assert part.epochs is not None
    return part.epochs * (num_images // part.batch_size)


def make_optimizer(part: Training, steps: int, masks: PyTree) -> optax.GradientTransformation:
    """SGD with Nesterov momentum; the learning rate falls tenfold at 1/2 and 3/4.

    Masks only matter for a new state: None where there is one already.
    """
    schedule = optax.piecewise_constant_schedule(
        part.learning_rate, {steps // 2: 0.1, steps * 3 // 4: 0.1}
    )
    return masked(
        optax.chain(
            optax.add_decayed_weights(part.weight_decay), optax.sgd(schedule, 0.9, nesterov=True)
        ),
        masks,
    )


def split_arm(arm: str) -> tuple[str, str]:
    """Method of the densities and way to initialise, of an arm."""
    method, dash, init = arm.partition("-")
    return (method, init) if dash and method in networks.DENSITY_METHODS else ("uniform", arm)


class Problem(NamedTuple):
    """A part with its network, and how the network takes images."""

    part: Training
    network: nn.Module
    shape: tuple[int, ...]  # of one input
    mean: np.ndarray
    std: np.ndarray


def make_problem(part: Training, mean: Any = 0.5, std: Any = 0.25) -> Problem:
    """Builds the network; mean and deviation of the pixels only matter for training."""
    shape, classes, _ = DATA_SHAPES[part.data]
    network = networks.make_network(part.network, part.depth, part.width, part.activation, classes)
    flat = (math.prod(shape),) if part.network == "mlp" else shape
    return Problem(part, network, flat, np.asarray(mean), np.asarray(std))


def inputs(problem: Problem, images: Any, key: PRNGKeyArray | None = None) -> jax.Array:
    """Normalised (in training also augmented) images, as the network takes them."""
    if problem.part.augment and key is not None:
        images = images_lib.random_crop_flip(key, images)
    x = images_lib.normalize(
        images, jnp.asarray(problem.mean, jnp.float32), jnp.asarray(problem.std, jnp.float32)
    )
    return x.reshape(len(x), *problem.shape)


def _loss_and_accuracy(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses, jnp.argmax(logits, -1) == labels


def make_loss(problem: Problem) -> state.LossFn:
    """``loss_fn(params, batch, key)`` for batches of uint8 images and labels."""

    def loss_fn(params, batch, key):
        logits = networks.forward(problem.network, params, inputs(problem, batch["images"], key))
        losses, correct = _loss_and_accuracy(logits, batch["labels"])
        return losses.mean(), {"accuracy": correct.mean()}

    return loss_fn


def initial(problem: Problem, arm: str, pruned: PyTree = None) -> Callable:
    """``key -> (params, masks)`` of an arm; `pruned` are the masks of its density method."""
    part = problem.part
    method, init = split_arm(arm)

    def draw(key):
        params, _ = networks.default_variables(problem.network, key, problem.shape)
        if pruned is None:
            by_shape = method if method in networks.SHAPE_METHODS else "uniform"
            densities = networks.densities_by_shape(params, part.density, by_shape)
        elif init == "default":
            return apply_masks(params, pruned), pruned
        else:
            densities = networks.densities_of_masks(params, pruned)
        return networks.initialize(
            init,
            key,
            params,
            densities,
            sigma_w=part.sigma_w,
            sigma_b=part.sigma_b,
            split=part.split,
            ai_steps=part.ai_steps,
        )

    return draw


def prune(problem: Problem, method: str, key, data: images_lib.ImageSplits) -> PyTree:
    """Masks that a pruning method finds in the default network, from training data."""
    part = problem.part
    params, fixed = networks.default_variables(problem.network, key, problem.shape)
    apply_fn = functools.partial(networks.forward, problem.network)

    def loss(params, batch):
        return _loss_and_accuracy(apply_fn(params, batch[0]), batch[1])[0].mean()

    def batch(start):
        rows = slice(start, start + part.batch_size)
        return inputs(problem, data.train_images[rows]), jnp.asarray(data.train_labels[rows])

    options: dict[str, Any] = dict(filter_fn=networks.is_kernel)
    if method == "snip":
        return pruning.snip(loss, params, batch(0), part.density, **options)
    if method == "grasp":
        starts = range(0, len(data.train_images) - part.batch_size + 1, part.batch_size)
        batches = _Mapped(batch, starts)
        return pruning.grasp(apply_fn, params, batches, part.density, **options)
    with jax.enable_x64(True):  # the flow through many layers leaves the range of float32
        params, fixed = jax.tree.map(lambda x: x.astype(jnp.float64), (params, fixed))
        flow = functools.partial(networks.forward, problem.network, statistics=fixed)
        row = jax.ShapeDtypeStruct((1, *problem.shape), jnp.float64)
        return pruning.synflow(flow, params, row, part.density, **options)


class _Mapped:
    """A function of indices, to be gone through more than once without keeping its results."""

    def __init__(self, function: Callable[[int], Any], indices: range):
        self._function, self._indices = function, indices

    def __iter__(self) -> Iterator[Any]:
        return map(self._function, self._indices)


def run_training(
    context: app.Context[Any],
    name: str,
    arm: str,
    seeds: Sequence[int],
    part: Training,
    data: images_lib.ImageSplits,
) -> dict:
    """One arm: one seed on the mesh, or all seeds at once as a population."""
    problem = make_problem(part, data.mean, data.std)
    steps = num_steps(part, len(data.train_images))
    method, _ = split_arm(arm)
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds))
    pruned = None
    if method not in networks.SHAPE_METHODS:
        pruned = prune(problem, method, keys[0], data)
    draw = initial(problem, arm, pruned)
    # Drawn layer by layer, not in one program: layers of one shape share what is compiled.
    drawn = jax.device_get([draw(key) for key in keys])
    start = functools.partial(_start, part, steps)
    step = make_step(problem, steps)
    if part.together:
        device_mesh = None
        params, masks = jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)
        train_state = jax.jit(jax.vmap(start))(params, masks, keys)
        step = jax.jit(jax.vmap(step), donate_argnums=0)
    else:
        device_mesh = context.mesh
        abstract = jax.eval_shape(start, *drawn[0], keys[0])
        shardings = _shardings(part, abstract, device_mesh)
        train_state = jax.jit(start, out_shardings=shardings)(*drawn[0], keys[0])
        step = mesh.jit_step(step, device_mesh, shardings)

    result: dict[str, Any] = {}
    if part.spectrum:
        result["singular_values"] = _spectrum(problem, train_state.params, data)
    _, evaluation = loop.run(
        train_state,
        step,
        _batches(part, data, seeds),
        num_steps=steps,
        evaluate=_evaluation(problem, data, device_mesh),
        eval_every=part.eval_every,
        checkpoint_every=part.checkpoint_every,
        items_per_step=part.batch_size * len(seeds),
        **context.loop_options(name) | {"mesh": device_mesh},
    )
    return result | {key: np.ravel(value).tolist() for key, value in evaluation.items()}


def _start(part: Training, steps: int, params: PyTree, masks: PyTree, key) -> state.TrainState:
    return state.init_state(params, make_optimizer(part, steps, masks), key)


def make_step(problem: Problem, steps: int) -> Callable:
    """``(state, batch) -> (state, metrics)``, not jitted; the masks come with the state."""
    return state.make_train_step(make_loss(problem), make_optimizer(problem.part, steps, None))


def _shardings(part: Training, abstract: state.TrainState, device_mesh) -> state.TrainState:
    return mesh.state_shardings(abstract, make_optimizer(part, 1, None), (), device_mesh)


def _batches(part: Training, data: images_lib.ImageSplits, seeds: Sequence[int]) -> BatchIterator:
    """Batches of uint8 images; of a population one for each seed."""
    orders = [shuffled_indices(len(data.train_images), part.batch_size, seed) for seed in seeds]
    rows_here = _rows_of_process(part.batch_size)

    def make_batch(index):
        rows = np.stack([order(index)[rows_here] for order in orders])
        rows = rows if part.together else rows[0]
        return {"images": data.train_images[rows], "labels": data.train_labels[rows]}

    return BatchIterator(
        make_batch, fingerprint=f"{part.data} batch={part.batch_size} seeds={list(seeds)}"
    )


def _rows_of_process(rows: int) -> slice:
    here, processes = jax.process_index(), jax.process_count()
    return slice(rows * here // processes, rows * (here + 1) // processes)


def _evaluation(problem: Problem, data: images_lib.ImageSplits, device_mesh) -> Callable:
    """``state -> test loss and accuracy``; with the statistics of some training batches."""
    part = problem.part

    def chunks(images, labels):
        for begin in range(0, len(images), part.eval_batch_size):
            rows = np.arange(begin, begin + part.eval_batch_size)[
                _rows_of_process(part.eval_batch_size)
            ]
            inside = rows < len(images)
            rows = np.where(inside, rows, 0)
            batch = {"images": images[rows], "labels": labels[rows], "weights": inside * 1.0}
            yield (
                jax.device_put(batch) if device_mesh is None else mesh.put_batch(batch, device_mesh)
            )

    held_out = list(chunks(data.test_images, data.test_labels))

    def statistics(params):
        if not networks.has_norm(problem.network):
            return None
        seen = itertools.islice(chunks(data.train_images, data.train_labels), _STATISTICS_BATCHES)
        batches = [inputs(problem, batch["images"]) for batch in seen]

        def of_one(params):
            return batch_statistics(problem.network, params, batches)

        return jax.vmap(of_one)(params) if part.together else of_one(params)

    def sums(params, statistics, batch):
        logits = networks.forward(
            problem.network, params, inputs(problem, batch["images"]), statistics
        )
        losses, correct = _loss_and_accuracy(logits, batch["labels"])
        return jnp.sum(losses * batch["weights"]), jnp.sum(correct * batch["weights"])

    total = jax.jit(jax.vmap(sums, (0, 0, None)) if part.together else sums)

    def evaluate(train_state):
        found = statistics(train_state.params)
        parts = [total(train_state.params, found, batch) for batch in held_out]
        loss, correct = np.sum(jax.device_get(parts), axis=0) / len(data.test_images)
        return {"test_loss": loss, "test_accuracy": correct}

    return evaluate


def _spectrum(problem: Problem, params: PyTree, data: images_lib.ImageSplits) -> list:
    """Singular values of the Jacobian at some test images."""
    at = inputs(problem, data.test_images[:_SPECTRUM_IMAGES])
    forward = functools.partial(networks.forward, problem.network)

    def values(params):
        return eoi.jacobian_spectrum(forward, params, at)

    return np.asarray(
        jax.jit(jax.vmap(values) if problem.part.together else values)(params)
    ).tolist()


def dry_run(context: app.Context[Any], parts: Mapping[str, Training]) -> None:
    """Compiles every part from shapes alone and prints its sizes."""
    rows = []
    for name, part in parts.items():
        problem = make_problem(part)
        shape, _, num_images = DATA_SHAPES[part.data]
        steps = num_steps(part, num_images)
        arm = next(arm for arm in part.arms if arm.endswith("eoi"))
        key = jax.random.key(0)
        drawn = jax.eval_shape(initial(problem, arm), key)
        abstract = jax.eval_shape(functools.partial(_start, part, steps), *drawn, key)
        shardings = _shardings(part, abstract, context.mesh)
        step = make_step(problem, steps)
        placed = mesh.batch_sharding(context.mesh)
        if part.batch_size % context.mesh.shape["data"]:
            raise ValueError(
                f"{name}: {part.batch_size} rows do not divide over data="
                f"{context.mesh.shape['data']}; choose another --mesh"
            )
        batch = {
            "images": jax.ShapeDtypeStruct((part.batch_size, *shape), jnp.uint8, sharding=placed),
            "labels": jax.ShapeDtypeStruct((part.batch_size,), jnp.int32, sharding=placed),
        }
        rows.append(
            {
                "part": name,
                "devices": context.mesh.size,
                "parameters": f"{sizes.count_parameters(abstract.params):,}",
                "steps": f"{steps:,}",
                "FLOPs/step": f"{sizes.count_flops(step, abstract, batch):.3e}",
            }
            | sizes.step_sizes(
                mesh.jit_step(step, context.mesh, shardings), abstract, shardings, batch
            )
        )
    report.table(rows, title=f"{context.preset}, compiled from shapes (memory as planned for CPU)")


def training_report(part: Training, results: Mapping[str, list[dict]]) -> list[dict[str, Any]]:
    """One row for each arm; results by arm, a dictionary for each run."""
    rows = []
    for arm, runs in results.items():
        row: dict[str, Any] = {
            "initialization": arm,
            "test accuracy": report.mean_and_standard_error(accuracies(runs)),
            "worst": float(np.min(accuracies(runs))),
            "test loss": report.mean_and_standard_error(_of(runs, "test_loss")),
        }
        if part.spectrum:
            values = np.asarray(_of(runs, "singular_values"))
            row["mean singular value"] = float(values.mean())
            row["largest"] = float(values[..., 0].mean())
        rows.append(row)
    return rows


def _of(runs: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    return np.concatenate([np.asarray(run[key], np.float64) for run in runs])


def accuracies(runs: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Test accuracies of all seeds."""
    return _of(runs, "test_accuracy")


def curves(context: app.Context[Any], folders: Mapping[str, list[str]]) -> dict:
    """Panels of the training curves; folders of the runs by arm."""
    panels: dict[str, dict[str, report.Curve]] = {"training loss": {}, "training accuracy": {}}
    for arm, runs in folders.items():
        for label, key in (("training loss", "loss"), ("training accuracy", "accuracy")):
            read = [metrics.read_metrics(context.arm(run), key) for run in runs]
            values = np.concatenate([v.reshape(len(v), -1) for _, v in read], axis=1)
            panels[label][arm] = report.Curve(read[0][0], values)
    return panels
