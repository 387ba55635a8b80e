"""Qwen's tokenizer, its language models (Qwen3) and its models of text and images (Qwen2.5-VL, Qwen3-VL)."""

from __future__ import annotations

from typing import Any

from transformers import (
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    Qwen3VLProcessor,
)

from tests.pipelines.text.bpe import bpe

_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<think>",
    "</think>",
]

# Contents are strings or lists of parts; `enable_thinking=False` adds an empty thought, as Qwen3's template does.
_CHAT = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def qwen_tokenizer(length: int = 512, *, padding_side: str = "right") -> Qwen2Tokenizer:
    """Byte-level BPE with the tokens of chats, of thoughts and of images."""
    vocabulary, merges = bpe()
    vocabulary = {**vocabulary, **{token: len(vocabulary) + i for i, token in enumerate(_SPECIAL)}}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=list(merges),
        additional_special_tokens=_SPECIAL[1:],
        eos_token="<|im_end|>",
        chat_template=_CHAT,
        model_max_length=length,
        padding_side=padding_side,
    )


def qwen3(
    *, hidden: int = 16, layers: int = 2, heads: int = 2, causal_lm: bool = False, padding_side: str = "right"
) -> tuple[Qwen2Tokenizer, Qwen3Model | Qwen3ForCausalLM]:
    """Qwen3 with or without the head for words."""
    tokenizer = qwen_tokenizer(padding_side=padding_side)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return tokenizer, (Qwen3ForCausalLM if causal_lm else Qwen3Model)(config).eval()


def _image_ids(tokenizer: Qwen2Tokenizer) -> dict[str, int]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def _mrope(width: int, **others: Any) -> dict[str, Any]:
    """The parts of a head of this width that turn with time, height and width."""
    half = width // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section, **others}


def qwen25_vl(
    *, hidden: int = 16, layers: int = 2, heads: int = 2, padding_side: str = "right"
) -> tuple[Qwen2Tokenizer, Qwen2_5_VLForConditionalGeneration]:
    """Qwen2.5-VL; its image encoder takes the output of `qwen2_vl_processor`."""
    tokenizer = qwen_tokenizer(padding_side=padding_side)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 2048,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "rope_parameters": _mrope(hidden // heads),
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": hidden,
            "fullatt_block_indexes": [0],
        },
        **_image_ids(tokenizer),
    )
    return tokenizer, Qwen2_5_VLForConditionalGeneration(config).eval()


def qwen3_vl(
    *, hidden: int = 16, layers: int = 2, heads: int = 2, causal_lm: bool = True, padding_side: str = "right"
) -> tuple[Qwen2Tokenizer, Qwen3VLModel | Qwen3VLForConditionalGeneration]:
    """Qwen3-VL with or without the head for words; its encoder of images takes what `qwen3_vl_processor` gives."""
    tokenizer = qwen_tokenizer(padding_side=padding_side)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": hidden // heads,
            "max_position_embeddings": 2048,
            "rope_parameters": _mrope(hidden // heads, mrope_interleaved=True),
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": hidden,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **_image_ids(tokenizer),
    )
    return tokenizer, (Qwen3VLForConditionalGeneration if causal_lm else Qwen3VLModel)(config).eval()


class ImageProcessor(Qwen2VLProcessor):
    """Qwen's processor without videos, which need torchvision."""

    def __init__(self, image_processor: Qwen2VLImageProcessorPil, tokenizer: Qwen2Tokenizer) -> None:
        self.image_token = "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token = "<|video_pad|>"
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=tokenizer.chat_template)


def qwen2_vl_processor(tokenizer: Qwen2Tokenizer) -> ImageProcessor:
    """A processor that makes every image small: 4 to 6 tokens."""
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 6)
    return ImageProcessor(images, tokenizer)


class Image3Processor(Qwen3VLProcessor):
    """Qwen3's processor without videos, which need torchvision."""

    def __init__(self, image_processor: Qwen2VLImageProcessorPil, tokenizer: Qwen2Tokenizer) -> None:
        for name in ("image", "video", "vision_start", "vision_end"):
            token = f"<|{name}_pad|>" if name in ("image", "video") else f"<|{name}|>"
            setattr(self, f"{name}_token", token)
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=tokenizer.chat_template)


def qwen3_vl_processor(tokenizer: Qwen2Tokenizer, *, largest: int = 6) -> Image3Processor:
    """A processor that makes every image small: 4 to `largest` tokens, each of 32 x 32 pixels."""
    images = Qwen2VLImageProcessorPil(patch_size=16, min_pixels=32 * 32 * 4, max_pixels=32 * 32 * largest)
    return Image3Processor(images, tokenizer)
