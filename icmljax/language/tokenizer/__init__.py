"""Text to token ids and back, for language models: tokenizers of GGUF and Hugging Face files."""

from icmljax.language.tokenizer.core import TextStream, Tokenizer
from icmljax.language.tokenizer.gguf import from_gguf
from icmljax.language.tokenizer.huggingface import from_json

__all__ = ["TextStream", "Tokenizer", "from_gguf", "from_json"]
