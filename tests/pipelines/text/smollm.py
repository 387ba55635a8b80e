"""SmolLM 3, with Qwen's way to cut text into tokens."""

from __future__ import annotations

from transformers import Qwen2Tokenizer, SmolLM3Config, SmolLM3ForCausalLM

from tests.pipelines.text.qwen import qwen_tokenizer


def smollm3(*, hidden: int = 16, layers: int = 3, heads: int = 2) -> tuple[Qwen2Tokenizer, SmolLM3ForCausalLM]:
    """The tokenizer and the model."""
    tokenizer = qwen_tokenizer()
    config = SmolLM3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer, SmolLM3ForCausalLM(config).eval()
