"""T5 and UMT5: a tokenizer of single characters, and an encoder."""

from __future__ import annotations

import string
from typing import Any

from transformers import T5Config, T5EncoderModel, T5TokenizerFast, UMT5Config, UMT5EncoderModel

_CHARACTERS = [character for character in string.printable if not character.isspace()]
_VOCABULARY = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0), *((c, -2.0) for c in _CHARACTERS)]


def tokenizer(max_length: int = 512) -> T5TokenizerFast:
    """Gives one token for each character, a `▁` before each word, and `</s>` at the end."""
    return T5TokenizerFast(vocab=_VOCABULARY, extra_ids=0, model_max_length=max_length)


def _sizes(width: int, heads: int, layers: int, vocabulary: int | None) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary or len(_VOCABULARY),
        "d_model": width,
        "d_kv": width // heads,
        "d_ff": 2 * width,
        "num_layers": layers,
        "num_heads": heads,
        "relative_attention_num_buckets": 8,
        "dropout_rate": 0.0,
        "feed_forward_proj": "gated-gelu",
    }


def t5(
    width: int = 16, heads: int = 2, layers: int = 1, max_length: int = 512, vocabulary: int | None = None
) -> tuple[T5TokenizerFast, T5EncoderModel]:
    """T5.

    Args:
        width: width of its output.
        max_length: tokens that a text is padded to by default.
        vocabulary: size of the encoder's vocabulary, for use with another tokenizer.
    """
    return tokenizer(max_length), T5EncoderModel(T5Config(**_sizes(width, heads, layers, vocabulary))).eval()


def umt5(
    width: int = 16, heads: int = 2, layers: int = 1, max_length: int = 512
) -> tuple[T5TokenizerFast, UMT5EncoderModel]:
    """UMT5, with the tokenizer of T5."""
    return tokenizer(max_length), UMT5EncoderModel(UMT5Config(**_sizes(width, heads, layers, None))).eval()
