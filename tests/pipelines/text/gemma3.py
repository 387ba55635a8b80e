"""Gemma 3, of text and images, with the tokenizer of Gemma 2."""

from __future__ import annotations

from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaTokenizer,
    SiglipVisionConfig,
)

from tests.pipelines.text.gemma import gemma_tokenizer


def gemma3(
    width: int = 16, heads: int = 2, layers: int = 2, max_length: int = 256
) -> tuple[GemmaTokenizer, Gemma3ForConditionalGeneration]:
    """Gemma 3: `width` is the width of its output. The tokens of images are the last three of its vocabulary."""
    tokenizer = gemma_tokenizer(max_length)
    words = len(tokenizer)
    text = Gemma3TextConfig(
        vocab_size=words + 3,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=8,
        max_position_embeddings=1024,
        sliding_window=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        initializer_range=0.2,
    )
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=words,
        eoi_token_index=words + 1,
        image_token_index=words + 2,
    )
    return tokenizer, Gemma3ForConditionalGeneration(config).eval()
