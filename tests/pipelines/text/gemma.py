"""Gemma 2: a tokenizer of single characters, and the model."""

from __future__ import annotations

import string

from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
_CHARACTERS = ["▁", "\n", *(character for character in string.printable if not character.isspace())]


def gemma_tokenizer(length: int = 512) -> GemmaTokenizer:
    """Gives `<bos>` and a token for each character."""
    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, *_CHARACTERS])}
    return GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=length, padding_side="right")


def gemma2(*, hidden: int = 16, layers: int = 2, heads: int = 2) -> tuple[GemmaTokenizer, Gemma2Model]:
    """Gemma 2; every second layer sees a window only."""
    tokenizer = gemma_tokenizer()
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        query_pre_attn_scalar=hidden // heads,
        sliding_window=16,
        attn_implementation="eager",
    )
    return tokenizer, Gemma2Model(config).eval()
