"""GLM 4: a tokenizer and the model."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GlmConfig, GlmModel, PreTrainedTokenizerFast

from tests.pipelines.text.bpe import bpe

_SPECIAL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>"]


def glm_tokenizer(length: int = 512) -> PreTrainedTokenizerFast:
    """Byte-level BPE that puts two tokens in front, and pads in front of them."""
    vocabulary, merges = bpe()
    vocabulary = {**vocabulary, **{token: len(vocabulary) + i for i, token in enumerate(_SPECIAL)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=[(token, vocabulary[token]) for token in _SPECIAL[1:3]]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=_SPECIAL[1:],
        padding_side="left",
        model_max_length=length,
    )


def glm(*, hidden: int = 16, layers: int = 2, heads: int = 2) -> tuple[PreTrainedTokenizerFast, GlmModel]:
    """The tokenizer and the model without a head."""
    tokenizer = glm_tokenizer()
    config = GlmConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return tokenizer, GlmModel(config).eval()
