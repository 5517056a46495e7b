"""Weights of Llama-family decoders from files, and into them.

`load_gguf` reads GGUF files, quantised or not; `load_hf` and `save_hf` a Hugging Face folder
(`config.json` and safetensors) of Llama, Mixtral or InternLM2; `save_orbax` and `load_orbax` keep
any of these in the form of this library, blocks of integers included. Nothing is downloaded.

Files are checked before they are believed: every size against that of the file, every tensor
against the configuration, every value for being finite. What is wrong raises a `ValueError` that
names file and tensor.
"""

from icmljax.language.weights.gguf import (
    config_from_gguf,
    load_gguf,
    read_gguf_metadata,
    smollm2_path,
)
from icmljax.language.weights.orbax import load_orbax, save_orbax
from icmljax.language.weights.safetensors import config_from_hf, load_hf, save_hf

__all__ = [
    "config_from_gguf",
    "config_from_hf",
    "load_gguf",
    "load_hf",
    "load_orbax",
    "read_gguf_metadata",
    "save_hf",
    "save_orbax",
    "smollm2_path",
]
