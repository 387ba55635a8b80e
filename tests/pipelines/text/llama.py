"""Llama, and Llava with its encoder of images: a tokenizer of single characters, and the prompt templates it needs."""

from __future__ import annotations

import string
from typing import Any

from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlamaTokenizerFast,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>"]
_CHARACTERS = ["▁", "\n", *(character for character in string.printable if not character.isspace())]
_SYSTEM = (
    "<|start_header_id|>system<|end_header_id|>\n\n{image}Video:<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
)
_END = "<|eot_id|>"
_ASSISTANT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
IMAGE_TOKENS = 4


def tokenizer(max_length: int = 256) -> LlamaTokenizerFast:
    """Gives one token for each character and each special token."""
    return LlamaTokenizerFast(
        vocab={token: i for i, token in enumerate([*_SPECIAL, *_CHARACTERS])},
        merges=[],
        pad_token="<pad>",
        additional_special_tokens=_SPECIAL[4:],
        padding_side="right",
        model_max_length=max_length,
    )


def _config(width: int, heads: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(_SPECIAL) + len(_CHARACTERS),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        initializer_range=0.2,
    )


def llama(
    width: int = 16, heads: int = 2, layers: int = 3, max_length: int = 256, causal_lm: bool = False
) -> tuple[LlamaTokenizerFast, LlamaModel | LlamaForCausalLM]:
    """Llama: `width` is the width of its output."""
    kind = LlamaForCausalLM if causal_lm else LlamaModel
    return tokenizer(max_length), kind(_config(width, heads, layers)).eval()


def llava(
    width: int = 16, heads: int = 2, layers: int = 3, max_length: int = 256
) -> tuple[LlamaTokenizerFast, LlavaForConditionalGeneration, CLIPImageProcessor]:
    """Llava, which takes `IMAGE_TOKENS` tokens for an image."""
    config = LlavaConfig(
        text_config=_config(width, heads, layers),
        vision_config=CLIPVisionConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
        ),
        image_token_index=_SPECIAL.index("<image>"),
        pad_token_id=3,
    )
    images = CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    return tokenizer(max_length), LlavaForConditionalGeneration(config).eval(), images


def read_template(tokens: Any, model: Any, start: str, length: int) -> None:
    """Make `start`, which a published template begins with, `length` tokens long: its first part is one token."""
    cut, _ = tokens(start, return_offsets_mapping=True).offset_mapping[1 - length]
    tokens.add_tokens([start[:cut]], special_tokens=True)
    model.resize_token_embeddings(len(tokens))
    assert len(tokens(start).input_ids) == length


def template() -> dict[str, Any]:
    """HunyuanVideo's template of prompts, but short."""
    start = _SYSTEM.format(image="")
    return {"template": start + "{}" + _END, "crop_start": len(tokenizer()(start).input_ids)}


def image_template() -> dict[str, Any]:
    """HunyuanVideo's template of prompts with an image, but short."""
    start = _SYSTEM.format(image="<image>\n")
    ids = tokenizer()(start).input_ids
    image = ids.index(_SPECIAL.index("<image>"))
    return {
        "template": start + "{}" + _END + _ASSISTANT,
        "crop_start": len(ids),
        "image_emb_start": image,
        "image_emb_end": image + IMAGE_TOKENS,
        "image_emb_len": IMAGE_TOKENS,
    }
