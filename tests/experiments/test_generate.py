"""The script that continues text: with the real model, with a tiny one in a folder, from shapes."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import tokenizers

from icmljax.language import llama, weights
from icmljax.language.linear import BLOCK
from tests.language.conftest import draw_params, smollm2_file

EXPERIMENT = "generate"
ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEED = re.compile(
    r"first token after [\d.]+ s \(with compilation\), then (\d+) tokens at [\d.]+ tokens/s\n"
)
SIZES = ("params", "optimizer_state", "temporaries", "cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder of a tiny model whose tokens are bytes."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({byte: i for i, byte in enumerate(alphabet)}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    config = llama.LlamaConfig(
        vocab_size=256,
        d_model=2 * BLOCK,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        d_ff=2 * BLOCK,
        max_length=48,
    )
    weights.save_hf(path, config, draw_params(config))
    backend.save(str(path / "tokenizer.json"))
    return path


def _run(*flags):
    """The script as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "experiments.generate", *flags],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )


def test_the_real_model_knows_paris():
    smollm2_file()
    done = _run("--model=smollm2", "--max_new_tokens=6", "--prompt=The capital of France is")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of France is Paris.")
    assert SPEED.fullmatch(done.stderr)


def test_the_real_model_answers(run_script):
    smollm2_file()
    flags = ["--chat", "--prompt=What is the capital of France?", "--weights=int4"]
    status, out, err = run_script(*flags, "--max_new_tokens=24", "--mesh=data=8")
    assert status == 0, err
    assert out == "The capital of France is Paris.\n"
    assert SPEED.fullmatch(err)


def test_prompts_of_a_batch_are_continued_as_alone(run_script, folder):
    options = [f"--model={folder}", "--max_new_tokens=12", "--temperature=0"]
    prompts = ["abc", "a longer one", "ü"]
    alone = [run_script(*options, f"--prompt={prompt}") for prompt in prompts]
    status, out, err = run_script(*options, *(f"--prompt={prompt}" for prompt in prompts))
    assert status == 0, err
    assert out == "".join(text for _, text, _ in alone)
    assert SPEED.fullmatch(err)[1] == str(3 * 11)
    for prompt, (_, text, _) in zip(prompts, alone, strict=True):
        assert text.startswith(prompt)
        assert len(text) > len(prompt)


def test_seeds_and_law(run_script, folder):
    options = [f"--model={folder}", "--prompt=abc", "--max_new_tokens=20"]
    law = ["--temperature=2", "--top_k=100", "--top_p=0.99", "--min_p=0.001"]
    law.append("--repetition_penalty=1.2")
    first, again, other = (run_script(*options, *law, f"--seed={seed}")[1] for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("kind", ["int8", "int4", "bfloat16"])
def test_weights_may_be_kept_small(run_script, folder, kind):
    status, out, err = run_script(f"--model={folder}", "--prompt=abc", f"--weights={kind}")
    assert status == 0, err
    assert out.startswith("abc")
    # 64 tokens were asked for, but the model reads 48 at most; the last one drawn is not read.
    assert SPEED.fullmatch(err)[1] == str(48 - 3)


def test_a_mesh_changes_nothing(run_script, folder):
    options = [f"--model={folder}", "--prompt=abc", "--max_new_tokens=20"]
    texts = {run_script(*options, f"--mesh=data={8 // n},model={n}")[1] for n in (1, 2)}
    assert len(texts) == 1


def _rows(out):
    """The table of a dry run: numbers of each step."""
    lines = [line for line in out.splitlines() if line.strip().startswith(("training", "decoding"))]
    return [[float(n.replace(",", "")) for n in re.findall(r"[\d,.]*\d", line)] for line in lines]


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_sizes_of_a_folder(run_script, folder, weights):
    """Against the sizes of the arrays; config.json is enough."""
    status, out, err = run_script(
        f"--model={folder}", "--dry_run", "--mesh=data=4,model=2", f"--weights={weights}"
    )
    assert status == 0, err
    training, decoding = _rows(out)
    config = weights_config(folder)
    total = 4 * llama.num_parameters(config) / 1e6
    assert training[:3] == decoding[:3] == [8, 4, 48]
    assert training[3] == pytest.approx(total / 8, abs=0.06)
    assert training[4] == pytest.approx(2 * total / 8, abs=0.06)
    # "data" and "model" divide dense matrices; blocks are divided by "model".
    small = total / 8 if weights == "float32" else total / 2 * 36 / 128
    assert decoding[3] == pytest.approx(small, abs=0.06)


def weights_config(folder):
    return weights.config_from_hf(json.loads((folder / "config.json").read_text()))


def test_large_models_compile_from_shapes(run_script):
    """Mixtral on eight devices."""
    status, out, err = run_script(
        "--model=mixtral-8x7b", "--dry_run", "--mesh=data=2,model=4", "--length=256"
    )
    assert status == 0, err
    training, decoding = _rows(out)
    total = 4 * llama.num_parameters(llama.CONFIGS["mixtral-8x7b"]) / 1e6
    assert training[3] == decoding[3] == pytest.approx(total / 8, rel=1e-3)
    assert training[4] == pytest.approx(2 * total / 8, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tinyllama-1.1b", "llama2-7b", "llama2-13b", "internlm2-7b"])
def test_large_models_on_64_devices(model):
    mesh = ["--num_virtual_devices=64", "--mesh=data=16,model=4"]
    done = _run(f"--model={model}", "--dry_run", *mesh)
    assert done.returncode == 0, done.stderr
    training, _ = _rows(done.stdout)
    total = 4 * llama.num_parameters(llama.CONFIGS[model]) / 1e6
    assert training[3] == pytest.approx(total / 64, rel=1e-2)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("there is no --prompt; give one", []),
        ("--model=nowhere is no GGUF file or Hugging Face folder", ["--model=nowhere"]),
        ("has no weights here; give --dry_run, or a GGUF file", ["--model=llama2-7b"]),
        ("is no Hugging Face folder with config.json", ["--model=nowhere", "--dry_run"]),
        ("--system is for conversations; give --chat, too", ["--system=Be brief."]),
        ("this tokenizer has no chat template", ["--chat"]),
        ("temperature must be 0 or more, got -1.0", ["--temperature=-1"]),
        ("top_k must be 1 or more, got 0", ["--top_k=0"]),
        ("the prompt is empty", ["--prompt="]),
        ("the prompt has 49 tokens; the model reads 48 at most", [f"--prompt={'a' * 49}"]),
        ("unexpected argument 'Paris'", ["Paris"]),
        ("value should be one of <float32|bfloat16|int8|int4>", ["--weights=int2"]),
    ],
)
def test_wrong_flags(fails, folder, message, flags):
    start = (
        [] if message.startswith("there is no") or "--prompt" in "".join(flags) else ["--prompt=a"]
    )
    fails(message, f"--model={folder}", *start, *flags)
