"""CLIP's tokenizer and text encoders."""

from __future__ import annotations

from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from tests.pipelines.text.bpe import bpe


def clip_tokenizer(length: int = 77) -> CLIPTokenizer:
    """A tokenizer that pads and cuts to so many tokens."""
    vocabulary, merges = bpe("</w>", lower=True)
    vocabulary = {**vocabulary, "<|startoftext|>": len(vocabulary), "<|endoftext|>": len(vocabulary) + 1}
    return CLIPTokenizer(vocab=vocabulary, merges=list(merges), model_max_length=length)


def clip(
    *, hidden: int = 32, layers: int = 2, heads: int = 4, length: int = 77, projection: int | None = None
) -> tuple[CLIPTokenizer, CLIPTextModel | CLIPTextModelWithProjection]:
    """The tokenizer and the encoder, with a projection of its pooled output to so many features."""
    tokenizer = clip_tokenizer(length)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=length,
        projection_dim=projection or hidden,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    kind = CLIPTextModel if projection is None else CLIPTextModelWithProjection
    return tokenizer, kind(config).eval()
