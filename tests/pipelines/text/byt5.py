"""ByT5: T5 on bytes."""

from __future__ import annotations

from transformers import ByT5Tokenizer, T5Config, T5EncoderModel


def byt5(*, width: int = 16, heads: int = 2, layers: int = 1) -> tuple[ByT5Tokenizer, T5EncoderModel]:
    """The tokenizer and an encoder of this width."""
    tokenizer = ByT5Tokenizer()
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=width // heads,
        d_ff=2 * width,
        num_layers=layers,
        num_heads=heads,
        relative_attention_num_buckets=8,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )
    return tokenizer, T5EncoderModel(config).eval()
