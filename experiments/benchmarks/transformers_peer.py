"""Peer of `experiments.benchmarks.language`, for an environment with torch and transformers.

    python transformers_peer.py FOLDER

Reads orders from stdin, one JSON object a line, and answers each with one: ``{"batch": 8,
"prompt": 64, "new": 32}`` with the seconds of a prefill and of that many steps of one token.
Of this project it imports nothing, which is not installed there.
"""

import json
import sys
import time

import torch
import transformers


def main(folder: str) -> None:
    """Loads the model, then answers until stdin ends."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    answer({"versions": versions, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        answer(measure(model, **json.loads(line)))


def answer(message: dict) -> None:
    """Writes one line, at once."""
    print(json.dumps(message), flush=True)


@torch.inference_mode()
def measure(model, *, batch: int, prompt: int, new: int) -> dict:
    """Times a prefill of token ids 1, 2, ... and greedy steps after it.

    The loop has the model and its cache only: `generate` of transformers has more to do at each
    step, which would be counted for it.
    """
    ids = torch.arange(1, prompt + 1).repeat(batch, 1)
    start = time.perf_counter()
    outputs = model(ids, use_cache=True, logits_to_keep=1)
    token = outputs.logits[:, -1:].argmax(-1)
    prefilled = time.perf_counter()
    tokens = []
    for _ in range(new):
        outputs = model(token, past_key_values=outputs.past_key_values, use_cache=True)
        tokens.append(token := outputs.logits[:, -1:].argmax(-1))
    decoded = time.perf_counter()
    return {
        "prefill": prefilled - start,
        "decode": decoded - prefilled,
        "tokens": torch.cat(tokens, 1)[0].tolist(),
    }


if __name__ == "__main__":
    main(sys.argv[1])
