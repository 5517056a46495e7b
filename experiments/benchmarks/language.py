"""How fast SmolLM2-135M reads and writes, against transformers on torch and the memory's limit.

    python -m experiments.benchmarks.language

The peer runs in an environment of its own, `make .venv-peer/stamp`; without it only our numbers are
shown. Both hold the same float32 weights, take turns, and read the same tokens.
"""

import json
import math
import pathlib
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from icmljax.experiments.benchmarks import harness
from icmljax.experiments.common import report
from icmljax.language import llama, weights
from icmljax.language.cache import DenseCache
from icmljax.language.generate import GREEDY, generate
from icmljax.language.linear import weight_bytes

_ROUNDS = 5
_PROMPT = 64
_NEW = 32
_BATCHES = (1, 8)
_PEER = "transformers"
_LOOP = "float32, layers in a loop"
_MIN_DECODE = {1: 1.0, 8: 2.0}  # x tokens/s of transformers
_MAX_COMPILE = 20.0  # seconds, of the first call
_MIN_SHARE = 0.7  # of the memory's limit, at batch 1


class Peer:
    """A process with transformers, which waits between orders."""

    def __init__(self, python: pathlib.Path, folder: pathlib.Path):
        script = str(pathlib.Path(__file__).with_name("transformers_peer.py"))
        self._process = subprocess.Popen(
            [str(python), "-P", script, str(folder)],  # -P: our kernels.py is not its kernels
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.machine = self._answer()

    def measure(self, batch: int) -> dict[str, Any]:
        """Seconds of a prefill and of the steps after it, and the tokens of one row."""
        assert self._process.stdin is not None
        order = {"batch": batch, "prompt": _PROMPT, "new": _NEW}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with status {self._process.wait()}")
        return json.loads(line)


class Ours:
    """This library with one kind of weights."""

    def __init__(self, config: llama.LlamaConfig, params: Any):
        self._config = config
        self._params = params

    def measure(self, batch: int) -> dict[str, Any]:
        """As `Peer.measure`: `generate` reads the prompt, and then goes on from its cache."""
        tokens = jnp.tile(jnp.arange(1, _PROMPT + 1), (batch, 1))
        cache = DenseCache.create(self._config, batch, _PROMPT + 1 + _NEW)
        jax.block_until_ready(cache)
        start = time.perf_counter()
        first = self._continue(cache, tokens, 1)
        prefilled = time.perf_counter()
        rest = self._continue(first.cache, first.tokens, _NEW)
        decoded = time.perf_counter()
        return {
            "prefill": prefilled - start,
            "decode": decoded - prefilled,
            "tokens": rest.tokens[0].tolist(),
        }

    def _continue(self, cache, tokens, number: int):
        result = generate(
            self._params,
            self._config,
            tokens,
            None,
            jax.random.key(0),
            max_new_tokens=number,
            sampling=GREEDY,
            cache=cache,
        )
        return jax.block_until_ready(result)


def read_bandwidth(num_bytes: int = 2**29, rounds: int = 7) -> float:
    """Bytes per second that two threads read from memory: the best of some rounds."""
    halves = np.ones((2, num_bytes // 8), np.float32)
    best = math.inf
    for _ in range(rounds):
        threads = [threading.Thread(target=np.max, args=(half,)) for half in halves]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = min(best, time.perf_counter() - start)
    return num_bytes / best


def compare(python: pathlib.Path) -> dict[str, Any]:
    """Measures all kinds of weights and the peer in turns."""
    config, params = weights.load_gguf(weights.smollm2_path())
    kinds = {  # the first three as the command `generate` has them on a CPU
        "float32": llama.unstack_layers(params),
        "int8": llama.quantize_params(params, 8),
        "int4": llama.quantize_params(params, 4),
        _LOOP: params,
    }
    cases: dict[str, Callable[[int], dict[str, Any]]] = {
        name: Ours(config, kind).measure for name, kind in kinds.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        peer = None
        if python.exists():
            weights.save_hf(pathlib.Path(folder, "model"), config, params)
            peer = Peer(python, pathlib.Path(folder, "model"))
            cases[_PEER] = peer.measure
        start = time.perf_counter()
        cases["float32"](1)
        first_call = time.perf_counter() - start
        measured: dict[str, dict[int, list[dict[str, Any]]]]
        measured = {name: {batch: [] for batch in _BATCHES} for name in cases}
        bandwidth = [read_bandwidth()]
        for batch in _BATCHES:
            for number in range(_ROUNDS + 1):  # the first compiles
                for name, case in cases.items():
                    result = case(batch)
                    if number:
                        measured[name][batch].append(result)
            bandwidth.append(read_bandwidth())
        if peer is not None:
            peer.close()
    return {
        "machine": harness.machine(),
        "peer": None if peer is None else peer.machine,
        "bandwidth": bandwidth,
        "first call": first_call,
        "bytes": {name: weight_bytes(kind) for name, kind in kinds.items()},
        "measured": measured,
    }


def main(directory: pathlib.Path, peer_python: pathlib.Path) -> None:
    """Compares, and prints tables and verdicts."""
    results = harness.in_new_process(compare, peer_python)
    measured, bandwidth = results["measured"], max(results["bandwidth"])
    print(harness.machine_line(results["machine"] | (results["peer"] or {"peer": "none"})))
    print(f"memory is read at {bandwidth / 1e9:.1f} GB/s; the first call took", end=" ")
    print(f"{results['first call']:.1f} s with compilation")

    def seconds(name: str, batch: int, what: str) -> float:
        return float(np.median([result[what] for result in measured[name][batch]]))

    rows = []
    verdicts = [
        report.Verdict(
            f"first call with compilation <= {_MAX_COMPILE:.0f} s",
            f"{results['first call']:.1f} s",
            results["first call"] <= _MAX_COMPILE,
        )
    ]
    for batch in _BATCHES:
        for name in measured:
            step = seconds(name, batch, "decode") / _NEW
            row: dict[str, Any] = {
                "weights": name,
                "batch": batch,
                "prefill tokens/s": batch * _PROMPT / seconds(name, batch, "prefill"),
                "decode tokens/s": batch / step,
                "ms a step": 1e3 * step,
            }
            if _PEER in measured:
                row["decode x peer"] = seconds(_PEER, batch, "decode") / _NEW / step
                row["prefill x peer"] = seconds(_PEER, batch, "prefill") / seconds(
                    name, batch, "prefill"
                )
            if name in results["bytes"]:
                row["MB a step"] = results["bytes"][name] / 1e6
                row["of the memory's limit"] = results["bytes"][name] / bandwidth / step
            rows.append(row)
            if name == "float32" and _PEER in measured:
                got, least = row["decode x peer"], _MIN_DECODE[batch]
                claim = f"decode at batch {batch} >= {least} x {_PEER}"
                verdicts.append(report.Verdict(claim, f"{got:.2f} x", got >= least))
            if name == "float32" and batch == 1:
                share = row["of the memory's limit"]
                claim = f"decode at batch 1 >= {_MIN_SHARE:.0%} of the memory's limit"
                verdicts.append(report.Verdict(claim, f"{share:.0%}", share >= _MIN_SHARE))
            if name in ("int8", "int4"):
                gain = seconds("float32", batch, "decode") / seconds(name, batch, "decode")
                claim = f"{name} decodes faster than float32 at batch {batch}"
                verdicts.append(report.Verdict(claim, f"{gain:.2f} x", gain > 1))
    if _PEER in measured:
        same = all(
            measured[_PEER][batch][0]["tokens"] == measured["float32"][batch][0]["tokens"]
            for batch in _BATCHES
        )
        verdicts.append(report.Verdict(f"same tokens as {_PEER}", str(same), same))
    title = f"SmolLM2-135M, prompt of {_PROMPT} tokens, {_NEW} steps, median of {_ROUNDS}"
    report.table(rows, title=title, path=directory / "language.md")
    report.conclude(
        directory, results=results, verdicts=verdicts, files=[directory / "language.md"]
    )


if __name__ == "__main__":
    harness.run(
        "language",
        __doc__,
        main,
        peer_python=(pathlib.Path(".venv-peer/bin/python"), "interpreter with transformers"),
    )
