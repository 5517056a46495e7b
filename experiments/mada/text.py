"""A GPT on text: Adam and its relatives against MADA from several initial points."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from icmljax.data import text
from icmljax.experiments.common import app, report, sizes
from icmljax.experiments.common.arms import select_arms
from icmljax.experiments.mada.shared import (
    ADAM,
    DIGITS_RATES,
    NAMES,
    NORMALIZED_RATES,
    Optimizer,
    coefficients,
)
from icmljax.nn import gpt
from icmljax.nn.cross_entropy import cross_entropy_chunked
from icmljax.optimizers import mada as mada_lib
from icmljax.optimizers.mada import MadaHyperparams, avgrad, hyper_adam, mada
from icmljax.training import loop, mesh, metrics, state
from icmljax.training import workdir as workdir_lib


@dataclasses.dataclass(frozen=True)
class Text:
    """Language modelling; lengths in steps, sizes in tokens."""

    model: gpt.GPTConfig
    num_steps: int
    batch_size: int
    learning_rate: float
    arms: tuple[str, ...]
    final_learning_rate: float = 0.0
    warmup_steps: int = 20
    weight_decay: float = 0.1
    b2: float = 0.95
    eps: float = 1e-6
    hyper_learning_rate: MadaHyperparams = mada_lib.DEFAULT_HYPER_LEARNING_RATE
    hyper_momentum: float = 0.0
    hyper_start_step: int = 50
    rows_per_device: int | None = None  # larger batches are accumulated
    precision: str = "f32"
    loss_chunk: int | None = None
    eval_batches: int = 8
    eval_batch_size: int = 64
    log_every: int = 10
    eval_every: int = 100
    checkpoint_every: int = 100
    openwebtext: bool = False


def text_optimizer(name: str, part: Text, static: MadaHyperparams | None = None) -> Optimizer:
    """An optimizer of the text part; ``static`` are the coefficients of "mada-static"."""
    scale = {"adam-lr3": 1 / 3, "adam-lr10": 3.0, "lion-lr0.3": 0.3}.get(name, 1.0)
    rate = optax.warmup_cosine_decay_schedule(
        0.0,
        scale * part.learning_rate,
        part.warmup_steps,
        part.num_steps,
        scale * part.final_learning_rate,
    )
    b1, b2, eps = 0.9, part.b2, part.eps
    decay: dict[str, Any] = dict(weight_decay=part.weight_decay, mask=gpt.decay_mask)
    learn: dict[str, Any] = dict(
        eps=eps,
        hyper_learning_rate=part.hyper_learning_rate,
        hyper_momentum=dict.fromkeys(NAMES[:5], part.hyper_momentum),
        hyper_start_step=part.hyper_start_step,
        **decay,
    )
    start = ADAM._replace(beta1=b1, beta2=b2)

    def decayed(direction: Optimizer) -> Optimizer:
        return optax.chain(
            direction,
            optax.add_decayed_weights(part.weight_decay, gpt.decay_mask),
            optax.scale_by_learning_rate(rate),
        )

    makers: dict[str, Callable[[], Optimizer]] = {
        "adam": lambda: decayed(optax.scale_by_adam(b1, b2, eps)),
        "adam-lr3": lambda: decayed(optax.scale_by_adam(b1, b2, eps)),
        "adam-lr10": lambda: decayed(optax.scale_by_adam(b1, b2, eps)),
        "adamw": lambda: optax.adamw(rate, b1, b2, eps, weight_decay=0.1, mask=gpt.decay_mask),
        "amsgrad": lambda: decayed(optax.scale_by_amsgrad(b1, b2, eps)),
        "avgrad": lambda: avgrad(rate, b1, b2, eps, **decay),
        "yogi": lambda: decayed(optax.scale_by_yogi(b1, b2)),
        "adan": lambda: decayed(optax.scale_by_adan()),
        "lion": lambda: decayed(optax.scale_by_lion(0.95, 0.98)),
        "lion-lr0.3": lambda: decayed(optax.scale_by_lion(0.95, 0.98)),
        "hyper_adam": lambda: hyper_adam(rate, b1, b2, **learn),
        "mada": lambda: mada(rate, start._replace(rho=0.6), **learn),
        "mada-rho0": lambda: mada(rate, start._replace(rho=0.0), **learn),
        "mada-beta3": lambda: mada(rate, start._replace(rho=0.6, beta3=0.9), **learn),
        "mada-bad-betas": lambda: mada(
            rate, start._replace(rho=0.6, beta1=0.7, beta2=0.8), **learn
        ),
        "adam-bad-betas": lambda: decayed(optax.scale_by_adam(0.7, 0.8, eps)),
        "mada-max": lambda: mada(rate, start._replace(rho=0.6), second_moment="max", **learn),
        "mada-digits-rates": lambda: mada(rate, start._replace(rho=0.6), **learn | DIGITS_RATES),
        "mada-normalized": lambda: mada(rate, start._replace(rho=0.6), **learn | NORMALIZED_RATES),
        "mada-static": lambda: mada(rate, static or start, frozen=NAMES, eps=eps, **decay),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), makers[name]())


def load_tokens(context: app.Context[Any], part: Text) -> text.Tokens:
    """The text of ``--data_dir``, or the standard library's sources."""
    if part.openwebtext:
        if context.data_dir is None:
            raise ValueError(
                f"the preset {context.preset} reads nanoGPT's train.bin and val.bin: give their "
                "folder as --data_dir"
            )
        tokens = text.load_bin(context.data_dir, part.model.vocab_size)
    elif context.data_dir is None:
        tokens = text.byte_tokens(text.standard_library_text(8_000_000))
    else:
        tokens = text.byte_tokens(text.read_text(context.data_dir))
    for some in (tokens.train, tokens.validation):  # too short? better now than after other arms
        text.evaluation_batches(some, batch_size=1, block_size=part.model.block_size, num_batches=1)
    return tokens


def text_loss(
    part: Text, device_mesh: jax.sharding.Mesh, *, training: bool
) -> tuple[gpt.GPT, state.LossFn]:
    """The model on a mesh and its loss."""
    dtype = state.Precision.from_string(part.precision).compute
    sharding = NamedSharding(device_mesh, P("data")) if device_mesh.size > 1 else None
    model = gpt.GPT(part.model, dtype=dtype, activation_sharding=sharding)

    def loss_fn(params, batch, key):
        outputs: Any = model.apply(
            params,
            batch["inputs"],
            deterministic=not training,
            rngs={"dropout": key},
            method="hidden_states",
        )
        hidden, embedding = outputs
        chunk = part.loss_chunk or part.model.block_size
        loss = cross_entropy_chunked(hidden, embedding, batch["targets"], chunk)
        return loss, {}

    return model, loss_fn


def _accumulation(part: Text, device_mesh: jax.sharding.Mesh) -> int:
    """The least number of micro-batches that keeps ``rows_per_device``."""
    data = device_mesh.shape["data"]
    rows, rest = divmod(part.batch_size, data)
    if rest:
        fitting = max(d for d in range(1, data + 1) if data % d == part.batch_size % d == 0)
        raise ValueError(
            f"a batch of {part.batch_size} sequences does not divide over data={data}; choose for "
            f"example --mesh=data={fitting},model={device_mesh.size // fitting}"
        )
    most = part.rows_per_device or rows
    return next(a for a in range(1, rows + 1) if rows % a == 0 and rows // a <= most)


def text_run(part: Text, optimizer: Optimizer, device_mesh: jax.sharding.Mesh):
    """(key -> state, abstract state, shardings, jitted step) of a text arm."""
    model, loss_fn = text_loss(part, device_mesh, training=True)
    precision = state.Precision.from_string(part.precision)
    init_state = functools.partial(state.init_state, optimizer=optimizer, precision=precision)

    def abstract_state(key):
        return init_state(_initial_params(model, device_mesh, key), key=key)

    abstract = jax.eval_shape(abstract_state, jax.random.key(0))
    shardings = mesh.state_shardings(abstract, optimizer, gpt.GPT_RULES, device_mesh)
    placed_state = jax.jit(init_state, out_shardings=shardings)

    def start(key):
        return placed_state(_initial_params(model, device_mesh, key), key=key)

    step = state.make_train_step(
        loss_fn,
        optimizer,
        grad_accumulation=_accumulation(part, device_mesh),
        precision=precision,
        state_metrics=coefficients,
    )
    return start, abstract, shardings, mesh.jit_step(step, device_mesh, shardings)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _initial_params(model: gpt.GPT, device_mesh: jax.sharding.Mesh, key):
    """Made in their places; all arms share what is compiled here."""
    tokens = jnp.zeros((device_mesh.shape["data"], model.config.block_size), jnp.int32)
    params = model.init(key, tokens)
    shardings = mesh.param_shardings(params, gpt.GPT_RULES, device_mesh)
    return jax.lax.with_sharding_constraint(params, shardings)


@functools.lru_cache(maxsize=2)
def _compiled_text_run(name: str, part: Text, static, device_mesh):
    """Seeds of one arm share the compiled step."""
    optimizer = text_optimizer(name, part, static)
    start, _, _, step = text_run(part, optimizer, device_mesh)
    _, loss_fn = text_loss(part, device_mesh, training=False)
    evaluate = state.make_eval_step(loss_fn, precision=state.Precision.from_string(part.precision))
    loss = jax.jit(lambda params, batch: evaluate(params, batch, jax.random.key(0))["loss"])
    return start, step, loss


def run_text(
    context: app.Context[Any], name: str, optimizer: str, seed: int, part: Text, tokens
) -> dict:
    """One arm with one seed."""
    static = None
    if optimizer == "mada-static":
        source = context.arm(f"text/mada/seed-{seed}") / "summary.json"
        if not source.exists():
            raise ValueError(
                f"the arm {name} starts from the arm text/mada/seed-{seed}: run it too"
            )
        learned = workdir_lib.read_json(source)["coefficients"]
        static = MadaHyperparams(**{n: float(np.clip(learned[n], 0, 1)) for n in NAMES})
    start, step, loss = _compiled_text_run(optimizer, part, static, context.mesh)
    processes = dict(process_index=jax.process_index(), process_count=jax.process_count())
    block = part.model.block_size
    held_out = [
        mesh.put_batch(batch, context.mesh)
        for batch in text.evaluation_batches(
            tokens.validation,
            batch_size=part.eval_batch_size,
            block_size=block,
            num_batches=part.eval_batches,
            **processes,
        )
    ]

    def evaluate(train_state):
        losses = [loss(train_state.params, batch) for batch in held_out]
        return {"eval_loss": np.mean(jax.device_get(losses))}

    final, evaluation = loop.run(
        start(jax.random.key(seed)),
        step,
        text.token_batches(
            tokens.train,
            batch_size=part.batch_size,
            block_size=block,
            seed=seed,
            fingerprint=tokens.fingerprint,
            **processes,
        ),
        num_steps=part.num_steps,
        evaluate=evaluate,
        log_every=part.log_every,
        eval_every=part.eval_every,
        checkpoint_every=part.checkpoint_every,
        best_metric="eval_loss",
        items_per_step=part.batch_size * block,
        **context.loop_options(name),
    )
    directory = context.arm(name)
    _, losses = metrics.read_metrics(directory, "loss")
    result: dict[str, Any] = {
        "eval_loss": float(evaluation["eval_loss"]),
        "train_loss": float(np.mean(losses[-5:])),
    }
    if found := coefficients(final):
        result["coefficients"] = {n: float(found[n]) for n in NAMES}
    return result


def dry_run(context: app.Context[Any], part: Text) -> None:
    """Compile the text part from shapes alone and print its sizes."""
    rows = []
    arms = {f"text/{name}/seed-0": name for name in part.arms}
    selected = select_arms(context.arms or ("text/adam/*", "text/mada/*"), arms)
    for name in (arms[arm] for arm in selected):
        optimizer = text_optimizer(name, part)
        _, abstract, shardings, step = text_run(part, optimizer, context.mesh)
        block = jax.ShapeDtypeStruct(
            (part.batch_size, part.model.block_size),
            jnp.int32,
            sharding=mesh.batch_sharding(context.mesh),
        )
        batch = {"inputs": block, "targets": block}
        tokens = part.batch_size * part.model.block_size
        rows.append(
            {
                "arm": name,
                "devices": context.mesh.size,
                "parameters": f"{gpt.num_parameters(part.model):,}",
                "tokens/step": f"{tokens:,}",
                "FLOPs/step": f"{gpt.flops_per_token(part.model) * tokens:.3e}",
            }
            | sizes.step_sizes(step, abstract, shardings, batch)
        )
    report.table(rows, title=f"{context.preset}, compiled from shapes (memory as planned for CPU)")


def text_report(context: app.Context[Any], part: Text, results: Mapping[str, list[dict]]):
    """Rows, verdicts and plot panels of the text part."""
    rows = []
    panels: dict[str, dict[str, report.Curve]] = {
        label: {} for label in ("training loss", "validation loss", *NAMES)
    }
    for name, runs in results.items():
        row: dict[str, Any] = {
            "optimizer": name,
            "validation loss": report.mean_and_standard_error([r["eval_loss"] for r in runs]),
            "train loss": report.mean_and_standard_error([r["train_loss"] for r in runs]),
        }
        if "coefficients" in runs[0]:
            for n in NAMES:
                row[n] = float(np.mean([r["coefficients"][n] for r in runs]))
        rows.append(row)
        for label, key in (
            ("training loss", "loss"),
            ("validation loss", "eval_loss"),
            *((n, n) for n in NAMES),
        ):
            if label in NAMES and "coefficients" not in runs[0]:
                continue
            read = [
                metrics.read_metrics(context.arm(f"text/{name}/seed-{i}"), key)
                for i in range(len(runs))
            ]
            panels[label][name] = report.Curve(read[0][0], np.stack([v for _, v in read], 1))
    verdicts = []
    if {"adam", "mada"} <= results.keys() and part.num_steps >= 200:
        loss = {n: [r["eval_loss"] for r in results[n]] for n in ("adam", "mada")}
        estimate, low, high = report.paired_bootstrap(loss["mada"], loss["adam"])
        start = dict(zip(NAMES, ADAM._replace(rho=0.6, beta2=part.b2), strict=True))
        moved = max(abs(r["coefficients"][n] - start[n]) for r in results["mada"] for n in NAMES)
        verdicts.append(
            report.Verdict(
                "text: MADA validation loss <= Adam + 0.01 and the coefficients moved",
                f"difference {estimate:+.4f}, 95% in [{low:+.4f}, {high:+.4f}]; moved {moved:.3f}",
                estimate <= 0.01 and moved > 1e-3,
            )
        )
    return rows, verdicts, panels
