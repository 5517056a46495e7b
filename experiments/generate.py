"""Continues text with a language model that is on disk, by default SmolLM2-135M.

    python -m experiments.generate --model=smollm2 --prompt="The capital of France is"
    python -m experiments.generate --chat --prompt="Why is the sky blue?" --temperature=0.7
    python -m experiments.generate --model=/path/to/hf_folder --prompt="Once upon a time"

Text goes to stdout as it comes, speed to stderr. `--dry_run` compiles a training step and a
decoding step of a model from shapes alone, and prints the bytes of each device:

    python -m experiments.generate --model=llama2-7b --dry_run --num_virtual_devices=8 \
        --mesh=data=2,model=4
"""

import dataclasses
import functools
import json
import math
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from icmljax.experiments.common import command, report
from icmljax.language import llama, tokenizer, weights
from icmljax.language.cache import DENSE_CACHE_RULES, DenseCache
from icmljax.language.generate import Sampling, generate
from icmljax.language.training import llama_decay_mask, make_loss
from icmljax.training import mesh as mesh_lib
from icmljax.training import state

_MODEL = flags.DEFINE_string(
    "model",
    "smollm2",
    "smollm2, a GGUF file or a Hugging Face folder; in a dry run also one of "
    + ", ".join(llama.CONFIGS),
)
_PROMPT = flags.DEFINE_multi_string(
    "prompt", None, "text to continue; given several times, they are one batch"
)
_CHAT = flags.DEFINE_bool("chat", False, "the prompt is a message to the model, which answers")
_SYSTEM = flags.DEFINE_string("system", None, "with --chat: what the model is told first")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "most tokens to draw", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0: always the most likely token")
_TOP_K = flags.DEFINE_integer("top_k", None, "draw from the k most likely tokens only")
_TOP_P = flags.DEFINE_float("top_p", None, "draw from the fewest tokens with this probability")
_MIN_P = flags.DEFINE_float("min_p", None, "leave out tokens below this times the most likely's")
_REPETITION_PENALTY = flags.DEFINE_float("repetition_penalty", None, "above 1: repeat less")
_SEED = flags.DEFINE_integer("seed", 0, "of the draws")
_WEIGHTS = flags.DEFINE_enum(
    "weights", "float32", ["float32", "bfloat16", "int8", "int4"], "how matrices are kept in memory"
)
_BATCH = flags.DEFINE_integer(
    "batch_size", None, "dry run: rows; default: one on each part of data", lower_bound=1
)
_LENGTH = flags.DEFINE_integer(
    "length", None, "dry run: tokens of a row; default: 4096, or what the model can", lower_bound=1
)


def main() -> None:
    """Generates, or compiles from shapes."""
    mesh = command.start_back_end()
    if command.DRY_RUN.value:
        dry_run(mesh)
    else:
        generate_text(mesh)


def generate_text(mesh: jax.sharding.Mesh) -> None:
    """Loads the model, prints its text as it comes, and says how fast it was."""
    prompts = _PROMPT.value
    if not prompts:
        raise ValueError('there is no --prompt; give one, like --prompt="The capital of France is"')
    sampling = Sampling(
        _TEMPERATURE.value,
        _TOP_K.value,
        _TOP_P.value,
        _MIN_P.value,
        _REPETITION_PENALTY.value,
    )
    sampling.check()
    source = _source(_MODEL.value)
    codec = tokenizer.from_json(source) if source.is_dir() else tokenizer.from_gguf(source)
    rows = [_encode(codec, prompt) for prompt in prompts]
    config, params = _load(source, mesh)

    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    room = config.max_length - int(lengths.max()) + 1
    if room < 1:
        raise ValueError(
            f"the prompt has {lengths.max()} tokens; the model reads {config.max_length} at most"
        )
    screen = _Screen(codec, prompts, codec.eos_ids)
    cache = DenseCache.create(config, len(rows), tokens.shape[1] + _MAX_NEW_TOKENS.value - 1)
    if mesh.size > 1:
        cache = jax.device_put(cache, mesh_lib.param_shardings(cache, DENSE_CACHE_RULES, mesh))
    screen.start()
    result = generate(
        params,
        config,
        jnp.asarray(tokens),
        jnp.asarray(lengths),
        jax.random.key(_SEED.value),
        max_new_tokens=min(_MAX_NEW_TOKENS.value, room),
        sampling=sampling,
        eos_ids=codec.eos_ids,
        cache=cache,
        callback=screen.show,
    )
    jax.block_until_ready(result.counts)
    jax.effects_barrier()
    screen.finish(np.asarray(result.tokens))
    if not result.ok.all():
        raise FloatingPointError("the model's logits are not finite; are its weights damaged?")


class _Screen:
    """Prints the text of one row as it comes, of several rows at the end, and measures time."""

    def __init__(self, codec: tokenizer.Tokenizer, prompts: list[str], eos_ids: tuple[int, ...]):
        self._codec = codec
        self._prompts = prompts
        self._eos_ids = eos_ids
        self._stream = codec.stream() if len(prompts) == 1 else None
        self._times: list[float] = []
        self._counts: list[int] = []

    def start(self) -> None:
        if self._stream and not _CHAT.value:
            print(self._prompts[0], end="", flush=True)
        self._times.append(time.perf_counter())

    def show(self, tokens: np.ndarray, active: np.ndarray) -> None:
        """The callback of `generate`."""
        self._times.append(time.perf_counter())
        self._counts.append(int(np.sum(active)))
        if self._stream and active[0]:
            print(self._stream.push(int(tokens[0])), end="", flush=True)

    def finish(self, tokens: np.ndarray) -> None:
        if self._stream:
            print(self._stream.flush(), flush=True)
        else:
            for prompt, row in zip(self._prompts, tokens, strict=True):
                text = self._codec.decode(row[row >= 0], special=False)
                print(text if _CHAT.value else prompt + text, flush=True)
        if jax.process_index() != 0:
            return
        start, first, *rest = self._times
        line = f"first token after {first - start:.2f} s (with compilation)"
        if rest:
            number = sum(self._counts[1:])
            line += f", then {number} tokens at {number / (rest[-1] - first):.1f} tokens/s"
        command.say(line)


def _source(name: str) -> pathlib.Path:
    """The file or folder of a model."""
    if name == "smollm2":
        return weights.smollm2_path()
    path = pathlib.Path(name)
    if not path.exists():
        hint = "has no weights here; give --dry_run, or a" if name in llama.CONFIGS else "is no"
        raise FileNotFoundError(
            f"--model={name} {hint} GGUF file or Hugging Face folder; without either, "
            "--model=smollm2 is the model that comes with a package"
        )
    return path


def _encode(codec: tokenizer.Tokenizer, prompt: str) -> list[int]:
    if _CHAT.value:
        system = [] if _SYSTEM.value is None else [{"role": "system", "content": _SYSTEM.value}]
        return codec.chat([*system, {"role": "user", "content": prompt}])
    if _SYSTEM.value is not None:
        raise ValueError("--system is for conversations; give --chat, too")
    ids = codec.encode(prompt)
    if not ids:
        raise ValueError("the prompt is empty, and this model has no token to begin with")
    return ids


def _load(source: pathlib.Path, mesh: jax.sharding.Mesh) -> tuple[llama.LlamaConfig, Any]:
    """Configuration and parameters, on the mesh if it has several devices."""
    dtype, bits = _weights_kind()
    shardings = mesh if mesh.size > 1 else None
    if source.is_dir():
        config, params = weights.load_hf(
            source, dtype=dtype, quantize_bits=bits, shardings=shardings
        )
    else:
        keep = bits == 4  # as the file has them
        config, params = weights.load_gguf(
            source, dtype=dtype, keep_quantized=keep, shardings=shardings
        )
        params = llama.quantize_params(params, 8) if bits == 8 else params
    # A CPU reads dense weights faster so, and blocks of integers slower.
    apart = mesh.size == 1 and bits is None and jax.default_backend() == "cpu"
    return config, llama.unstack_layers(params) if apart else params


def _weights_kind() -> tuple[Any, int | None]:
    """The type of dense weights, and the bits of quantised ones."""
    kind = _WEIGHTS.value
    return jnp.bfloat16 if kind == "bfloat16" else jnp.float32, {"int8": 8, "int4": 4}.get(kind)


def dry_run(mesh: jax.sharding.Mesh) -> None:
    """Compiles a training step and a decoding step from shapes, and prints their sizes."""
    config = _config(_MODEL.value)
    length = _LENGTH.value or min(config.max_length, 4096)
    batch = _BATCH.value or mesh.shape["data"]
    rows = [
        {"step": name, "devices": mesh.size, "rows": batch, "tokens of a row": length}
        | {f"{key} MB/device": f"{size / 1e6:,.1f}" for key, size in measure().items()}
        for name, measure in (
            ("training, AdamW", functools.partial(_training_sizes, config, mesh, batch, length)),
            ("decoding", functools.partial(_decoding_sizes, config, mesh, batch, length)),
        )
    ]
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    report.table(
        rows,
        title=f"{_MODEL.value}, {llama.num_parameters(config):,} parameters on {axes}, "
        "compiled from shapes (temporaries as planned for CPU)",
    )


def _config(name: str) -> llama.LlamaConfig:
    """Sizes of a model by its name or its folder, where config.json is enough."""
    if name == "smollm2":
        name = "smollm2-135m"
    if name in llama.CONFIGS:
        return llama.CONFIGS[name]
    path = pathlib.Path(name) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"--model={name} is no Hugging Face folder with config.json, and none of "
            f"{', '.join(llama.CONFIGS)}"
        )
    return weights.config_from_hf(json.loads(path.read_text(encoding="utf-8")))


def _training_sizes(config, mesh, batch: int, length: int) -> dict[str, int]:
    """Bytes per device of a training step: bfloat16 products, float32 parameters and moments."""
    config = dataclasses.replace(config, remat=True)
    optimizer = optax.adamw(1e-4, mask=llama_decay_mask)
    precision = state.Precision.from_string("bf16")
    loss_fn = make_loss(
        config,
        dtype=jnp.bfloat16,
        chunk=math.gcd(length, 512),
        activation_sharding=NamedSharding(mesh, P("data")),
    )
    abstract = jax.eval_shape(
        lambda key: state.init_state(
            llama.init(key, config), optimizer=optimizer, key=key, precision=precision
        ),
        jax.random.key(0),
    )
    rules = llama.sharding_rules(config, mesh)
    shardings = mesh_lib.state_shardings(abstract, optimizer, rules, mesh)
    step = mesh_lib.jit_step(
        state.make_train_step(loss_fn, optimizer, precision=precision), mesh, shardings
    )
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=mesh_lib.batch_sharding(mesh))
    compiled = step.lower(_placed(abstract, shardings), {"tokens": ids, "targets": ids}).compile()
    return mesh_lib.memory_report(compiled, abstract, shardings)


def _decoding_sizes(config, mesh, batch: int, length: int) -> dict[str, int]:
    """Bytes per device of one step of generation, with a full cache of bfloat16."""
    dtype, bits = _weights_kind()
    params = llama.abstract_params(config, dtype)
    if bits is not None:
        params = jax.eval_shape(functools.partial(llama.quantize_params, bits=bits), params)
    cache = jax.eval_shape(lambda: DenseCache.create(config, batch, length, jnp.bfloat16))
    shardings = (
        mesh_lib.param_shardings(params, llama.sharding_rules(config, mesh), mesh),
        mesh_lib.param_shardings(cache, DENSE_CACHE_RULES, mesh),
    )

    def step(params, cache, tokens):
        hidden, cache = llama.extend(params, config, cache, tokens, dtype=jnp.bfloat16)
        return llama.logits(params, hidden[:, 0]), cache

    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32, sharding=mesh_lib.batch_sharding(mesh))
    placed = _placed((params, cache), shardings)
    compiled = jax.jit(step, donate_argnums=1).lower(*placed, tokens).compile()
    return {
        "params": mesh_lib.bytes_per_device(params, shardings[0]),
        "cache": mesh_lib.bytes_per_device(cache, shardings[1]),
        "temporaries": mesh_lib.temporary_bytes(compiled),
    }


def _placed(abstract, shardings):
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        shardings,
    )


if __name__ == "__main__":
    command.run(main, extra="experiments,lm")
