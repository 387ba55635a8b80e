"""Mistral3 and Ministral: a tokenizer with a chat template, and the model of text and images."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, Mistral3Model, PreTrainedTokenizerFast

from tests.pipelines.text.bpe import bpe

_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]"]

# Contents are strings or lists of parts.
_CHAT = """<s>{%- for message in messages -%}
{{- '[SYSTEM_PROMPT]' if message.role == 'system' else '[INST]' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}
{%- for part in message.content -%}{{- part.text if part.type == 'text' else '[IMG]' -}}{%- endfor -%}{%- endif -%}
{{- '[/SYSTEM_PROMPT]' if message.role == 'system' else '[/INST]' -}}
{%- endfor -%}"""


def mistral_tokenizer(length: int = 512) -> PreTrainedTokenizerFast:
    """Byte-level BPE that pads in front."""
    vocabulary, merges = bpe()
    vocabulary = {**vocabulary, **{token: len(vocabulary) + i for i, token in enumerate(_SPECIAL)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=_SPECIAL[4:],
        chat_template=_CHAT,
        padding_side="left",
        model_max_length=length,
    )


def mistral3(
    *, hidden: int = 16, layers: int = 2, heads: int = 2, causal_lm: bool = True
) -> tuple[PreTrainedTokenizerFast, Mistral3Model | Mistral3ForConditionalGeneration]:
    """Mistral3. Its processor needs torchvision; the tokenizer is asked in the same way where there is no image."""
    tokenizer = mistral_tokenizer()
    config = Mistral3Config(
        text_config={
            "model_type": "mistral",
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": hidden // heads,
            "max_position_embeddings": 1024,
            "sliding_window": None,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
    )
    return tokenizer, (Mistral3ForConditionalGeneration if causal_lm else Mistral3Model)(config).eval()
