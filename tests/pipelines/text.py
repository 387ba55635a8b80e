"""Tiny tokenizers and text encoders. Each function of an encoder returns the tokenizer and the encoder.

Classes are read from `transformers` where they are used: its models take seconds to import.
"""

from __future__ import annotations

import functools
import json
import string
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

# Words of the templates that pipelines put before a prompt and cut off again after a fixed count of tokens: each of
# these words is one token, as it is for the real tokenizers; all other words become pieces of them or single bytes.
_WORDS = """
Describe the image by detailing color quantity text shape size texture spatial relationships of objects and background
key features input then explain how user s instruction should alter or modify Generate a new that meets requirements
while maintaining consistency with original where appropriate system assistant user Picture video motion camera actions
As an captioning expert generate descriptive prompt based on content suitable for to model editing first analyze
attributes Then precisely clearly determine given ensuring only specified parts are altered all other aspects remain
consistent You engineer Based provided source second target create interesting can be used together detailed scene
think enable_thinking helpful designed superior images degree alignment textual prompts Start generation follow
literally Pay careful attention layout described as left must appear right Match exact object counts assign colors
correct AI reasons about descriptions give structured responses focusing attribution without speculation JSON short
"""
_CHARACTERS = [character for character in string.printable if not character.isspace()]
_SPACES = ["▁", "\n", *_CHARACTERS]


@functools.cache
def _bpe(end_of_word: str = "", lower: bool = False) -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    """Vocabulary and merges: all bytes (also with the suffix for the end of a word), and the words above.

    Args:
        end_of_word: suffix of the last piece of a word (CLIP has "</w>"); a word has no space before it then.
        lower: whether the tokenizer makes all letters small.
    """
    words = sorted({word.lower() if lower else word for word in _WORDS.split()})
    corpus = [piece for word in words for piece in ([word] if end_of_word else [word, f" {word}"])]
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=end_of_word))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=alphabet,
        end_of_word_suffix=end_of_word,
        special_tokens=[letter + end_of_word for letter in alphabet] if end_of_word else [],
    )
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    return model["vocab"], tuple(merges)


def _with_special(special: list[str], *bpe: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    vocabulary, merges = _bpe(*bpe)
    return {**vocabulary, **{token: len(vocabulary) + i for i, token in enumerate(special)}}, list(merges)


def _bytes_tokenizer(special: list[str], unknown: str | None = None, before: str = "", **names: Any) -> Any:
    """Byte-level BPE that pads in front. Args: before: tokens put before a text."""
    vocabulary, merges = _with_special(special)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if before:
        pairs = [(token, vocabulary[token]) for token in before.split()]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{before} $A", special_tokens=pairs)
    others = {"unk_token": unknown} if unknown else {}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", model_max_length=512, **others, **names
    )


def _sizes(tokenizer: Any, hidden: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    """The sizes that configurations of language models have in common."""
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    return {"vocab_size": len(tokenizer), **sizes, "num_attention_heads": heads, **others}


def _language(tokenizer: Any, hidden: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    """The same with as many heads of keys as of queries."""
    others = {"num_key_value_heads": heads, "max_position_embeddings": 1024, **others}
    return _sizes(tokenizer, hidden, layers, heads, **others)


_VISION = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}


# BERT, CLIP and T5


def bert(hidden: int = 16, length: int = 77) -> tuple[Any, Any]:
    """BERT with a tokenizer of single characters, which makes letters small."""
    characters = [character for character in _CHARACTERS if not character.isupper()]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{x}" for x in characters)]
    tokenizer = transformers.BertTokenizer(vocab={x: i for i, x in enumerate(tokens)}, model_max_length=length)
    config = transformers.BertConfig(**_sizes(tokenizer, hidden, 2, 2, max_position_embeddings=length))
    return tokenizer, transformers.BertModel(config).eval()


def clip(hidden: int = 32, heads: int = 4, length: int = 77, projection: int | None = None) -> tuple[Any, Any]:
    """CLIP, with a projection of its pooled output to so many features."""
    vocabulary, merges = _with_special(["<|startoftext|>", "<|endoftext|>"], "</w>", True)
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=length)
    ids = {f"{x}_token_id": getattr(tokenizer, f"{x}_token_id") for x in ("bos", "eos", "pad")}
    sizes = _sizes(tokenizer, hidden, 2, heads, max_position_embeddings=length, projection_dim=projection or hidden)
    kind = "CLIPTextModel" if projection is None else "CLIPTextModelWithProjection"
    return tokenizer, getattr(transformers, kind)(transformers.CLIPTextConfig(**sizes, **ids)).eval()


def t5_tokenizer(length: int = 512) -> Any:
    """Gives one token for each character, a `▁` before each word, and `</s>` at the end."""
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0), *((x, -2.0) for x in _CHARACTERS)]
    return transformers.T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=length)


def t5(width: int = 16, length: int = 512, kind: str = "T5", tokenizer: Any = None) -> tuple[Any, Any]:
    """T5 or UMT5. Args: width: width of its output. length: tokens that a text is padded to by default."""
    tokenizer = tokenizer or t5_tokenizer(length)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=width // 2,
        d_ff=2 * width,
        num_layers=1,
        num_heads=2,
        relative_attention_num_buckets=8,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )
    return tokenizer, getattr(transformers, f"{kind}EncoderModel")(config).eval()


def umt5(width: int = 16) -> tuple[Any, Any]:
    """UMT5, with the tokenizer of T5."""
    return t5(width, kind="UMT5")


def byt5(width: int = 16) -> tuple[Any, Any]:
    """ByT5: T5 on bytes."""
    return t5(width, tokenizer=transformers.ByT5Tokenizer())


# Gemma


def gemma_tokenizer(length: int = 512) -> Any:
    """Gives `<bos>` and a token for each character."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *_SPACES]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return transformers.GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=length, padding_side="right")


def gemma2(hidden: int = 16) -> tuple[Any, Any]:
    """Gemma 2; every second layer sees a window only."""
    tokenizer, width = gemma_tokenizer(), hidden // 2
    sizes = _sizes(tokenizer, hidden, 2, 2, num_key_value_heads=2, head_dim=width, query_pre_attn_scalar=width)
    config = transformers.Gemma2Config(**sizes, sliding_window=16, attn_implementation="eager")
    return tokenizer, transformers.Gemma2Model(config).eval()


def gemma3() -> tuple[Any, Any]:
    """Gemma 3, of text and images. The tokens of images are the last three of its vocabulary."""
    tokenizer = gemma_tokenizer(256)
    words = len(tokenizer)
    ids = {f"{x}_token_id": getattr(tokenizer, f"{x}_token_id") for x in ("bos", "eos", "pad")}
    sizes = _language(tokenizer, 16, 2, 2, head_dim=8, sliding_window=64, initializer_range=0.2)
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**{**sizes, "vocab_size": words + 3}, **ids),
        vision_config=transformers.SiglipVisionConfig(hidden_size=8, intermediate_size=16, **_VISION),
        mm_tokens_per_image=4,
        boi_token_index=words,
        eoi_token_index=words + 1,
        image_token_index=words + 2,
    )
    return tokenizer, transformers.Gemma3ForConditionalGeneration(config).eval()


def t5_gemma(length: int) -> tuple[Any, Any]:
    """PRX's encoder: that of T5Gemma."""
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    tokenizer = gemma_tokenizer(length)
    sizes = _sizes(tokenizer, 16, 1, 2, num_key_value_heads=2, head_dim=8, dropout_rate=0.0)
    return tokenizer, T5GemmaEncoder(transformers.T5GemmaModuleConfig(**sizes)).eval()


def t5_gemma_model() -> tuple[Any, Any]:
    """Stable Audio 3's encoder: T5Gemma without its decoder."""
    tokenizer = t5_tokenizer()
    sizes = _language(tokenizer, 16, 1, 2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64)
    module = transformers.T5GemmaModuleConfig(
        **sizes, sliding_window=64, layer_types=["full_attention"], initializer_range=0.2
    ).to_dict()
    config = transformers.T5GemmaConfig(encoder=module, decoder=module, is_encoder_decoder=False)
    return tokenizer, transformers.T5GemmaEncoderModel(config).eval()


def t5_gemma2() -> tuple[Any, Any]:
    """T5Gemma 2; its encoder of images takes pictures of 8 x 8, 4 tokens each."""
    from transformers.models.t5gemma2 import T5Gemma2EncoderConfig, T5Gemma2TextConfig
    from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

    tokenizer, ids = t5_tokenizer(), {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    sizes = _language(tokenizer, 16, 1, 2, head_dim=8, max_position_embeddings=128, dropout_rate=0.0)
    text = T5Gemma2TextConfig(**sizes, **ids, initializer_range=0.2)
    vision = transformers.SiglipVisionConfig(hidden_size=8, intermediate_size=16, **_VISION)
    config = T5Gemma2EncoderConfig(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return tokenizer, T5Gemma2Encoder(config).eval()


# GLM, Llama and Mistral


def glm(hidden: int = 16) -> tuple[Any, Any]:
    """GLM 4, which puts two tokens before a text."""
    special = ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>"]
    names = {"eos_token": special[0], "pad_token": special[0], "additional_special_tokens": special[1:]}
    tokenizer = _bytes_tokenizer(special, before="[gMASK] <sop>", **names)
    ids = {f"{x}_token_id": getattr(tokenizer, f"{x}_token_id") for x in ("eos", "pad")}
    config = transformers.GlmConfig(**_language(tokenizer, hidden, 2, 2, head_dim=hidden // 2), **ids)
    return tokenizer, transformers.GlmModel(config).eval()


_LLAMA = ["<unk>", "<s>", "</s>", "<pad>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>"]
_SYSTEM = (
    "<|start_header_id|>system<|end_header_id|>\n\n{image}Video:<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
)


def llama_tokenizer(length: int = 256) -> Any:
    """Gives one token for each character and each special token."""
    return transformers.LlamaTokenizerFast(
        vocab={token: i for i, token in enumerate([*_LLAMA, *_SPACES])},
        merges=[],
        pad_token="<pad>",
        additional_special_tokens=_LLAMA[4:],
        padding_side="right",
        model_max_length=length,
    )


def _llama_config(tokenizer: Any, layers: int = 3) -> Any:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    return transformers.LlamaConfig(**_sizes(tokenizer, 16, layers, 2), **ids, initializer_range=0.2)


def llama() -> tuple[Any, Any]:
    """Llama without the head for words."""
    tokenizer = llama_tokenizer()
    return tokenizer, transformers.LlamaModel(_llama_config(tokenizer)).eval()


def llama_causal() -> tuple[Any, Any]:
    """Llama with the head for words; HiDream asks for its attention too."""
    tokenizer = llama_tokenizer()
    model = transformers.LlamaForCausalLM(_llama_config(tokenizer, layers=2)).eval()
    model.set_attn_implementation("eager")
    return tokenizer, model


def llava() -> tuple[Any, Any, Any]:
    """Llava, which takes 4 tokens for an image, and its image processor."""
    tokenizer = llama_tokenizer()
    vision = transformers.CLIPVisionConfig(hidden_size=16, intermediate_size=32, **{**_VISION, "num_hidden_layers": 2})
    index = {"image_token_index": _LLAMA.index("<image>"), "pad_token_id": 3}
    config = transformers.LlavaConfig(text_config=_llama_config(tokenizer), vision_config=vision, **index)
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    return tokenizer, transformers.LlavaForConditionalGeneration(config).eval(), images


def read_template(tokens: Any, model: Any, start: str, length: int) -> None:
    """Make `start`, which a published template begins with, `length` tokens long: its first part is one token."""
    cut, _ = tokens(start, return_offsets_mapping=True).offset_mapping[1 - length]
    tokens.add_tokens([start[:cut]], special_tokens=True)
    model.resize_token_embeddings(len(tokens))
    assert len(tokens(start).input_ids) == length


def template() -> dict[str, Any]:
    """HunyuanVideo's template of prompts, but short."""
    start = _SYSTEM.format(image="")
    return {"template": start + "{}<|eot_id|>", "crop_start": len(llama_tokenizer()(start).input_ids)}


def image_template() -> dict[str, Any]:
    """HunyuanVideo's template of prompts with an image, but short."""
    start = _SYSTEM.format(image="<image>\n")
    ids = llama_tokenizer()(start).input_ids
    image = ids.index(_LLAMA.index("<image>"))
    return {
        "template": start + "{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "crop_start": len(ids),
        "image_emb_start": image,
        "image_emb_end": image + 4,
        "image_emb_len": 4,
    }


_MISTRAL = ["<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]"]
_MISTRAL_CHAT = """<s>{%- for message in messages -%}
{{- '[SYSTEM_PROMPT]' if message.role == 'system' else '[INST]' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}
{%- for part in message.content -%}{{- part.text if part.type == 'text' else '[IMG]' -}}{%- endfor -%}{%- endif -%}
{{- '[/SYSTEM_PROMPT]' if message.role == 'system' else '[/INST]' -}}
{%- endfor -%}"""


def mistral3(layers: int = 2, causal_lm: bool = True) -> tuple[Any, Any]:
    """Mistral3. Its processor needs torchvision; the tokenizer is asked in the same way where there is no image."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": _MISTRAL_CHAT}
    tokenizer = _bytes_tokenizer(_MISTRAL, "<unk>", additional_special_tokens=_MISTRAL[4:], **names)
    ids = {f"{x}_token_id": getattr(tokenizer, f"{x}_token_id") for x in ("bos", "eos", "pad")}
    sizes = _language(tokenizer, 16, layers, 2, head_dim=8, sliding_window=None)
    vision = {**_VISION, "hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **sizes, **ids},
        vision_config={"model_type": "pixtral", **vision},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
    )
    kind = transformers.Mistral3ForConditionalGeneration if causal_lm else transformers.Mistral3Model
    return tokenizer, kind(config).eval()


# Qwen

_QWEN = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<think>", "</think>"),
]

# Contents are strings or lists of parts; `enable_thinking=False` adds an empty thought, as Qwen3's template does.
_QWEN_CHAT = """{%- for message in messages -%}
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


def qwen_tokenizer() -> Any:
    """Byte-level BPE with the tokens of chats, of thoughts and of images."""
    vocabulary, merges = _with_special(_QWEN)
    return transformers.Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        additional_special_tokens=_QWEN[1:],
        eos_token="<|im_end|>",
        chat_template=_QWEN_CHAT,
        model_max_length=512,
        padding_side="right",
    )


def qwen3(hidden: int = 16, layers: int = 2, causal_lm: bool = False) -> tuple[Any, Any]:
    """Qwen3 with or without the head for words."""
    tokenizer = qwen_tokenizer()
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.Qwen3Config(**_language(tokenizer, hidden, layers, 2, head_dim=hidden // 2), **ids)
    return tokenizer, (transformers.Qwen3ForCausalLM if causal_lm else transformers.Qwen3Model)(config).eval()


def smollm3() -> tuple[Any, Any]:
    """SmolLM 3, with Qwen's tokenizer."""
    tokenizer = qwen_tokenizer()
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.SmolLM3Config(**_language(tokenizer, 16, 3, 2), **ids)
    return tokenizer, transformers.SmolLM3ForCausalLM(config).eval()


def _of_images(kind: str, tokenizer: Any, width: int, text: dict[str, Any], **vision: Any) -> Any:
    """A configuration of text and images. Args: width: of a head."""
    half = width // 2  # the parts of a head that turn with time, height and width
    section = [half - 2 * (half // 3), half // 3, half // 3]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section, **text.pop("rope", {})}
    pads = {f"{x}_token_id": tokenizer.convert_tokens_to_ids(f"<|{x}_pad|>") for x in ("image", "video")}
    ends = {f"vision_{x}_token_id": tokenizer.convert_tokens_to_ids(f"<|vision_{x}|>") for x in ("start", "end")}
    sizes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision = {**sizes, "out_hidden_size": text["hidden_size"], **vision}
    text = {**text, "max_position_embeddings": 2048, "rope_parameters": rope}
    return getattr(transformers, kind)(text_config=text, vision_config=vision, **pads, **ends)


def qwen25_vl(layers: int = 2) -> tuple[Any, Any]:
    """Qwen2.5-VL; its image encoder takes the output of `qwen2_processor`."""
    tokenizer = qwen_tokenizer()
    text = _language(tokenizer, 16, layers, 2, bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    config = _of_images("Qwen2_5_VLConfig", tokenizer, 8, text, fullatt_block_indexes=[0])
    return tokenizer, transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


def qwen3_vl(hidden: int = 16, layers: int = 2, heads: int = 2, causal_lm: bool = True) -> tuple[Any, Any]:
    """Qwen3-VL with or without the head for words; its encoder of images takes what `qwen3_processor` gives."""
    tokenizer, width = qwen_tokenizer(), hidden // heads
    text = _language(tokenizer, hidden, layers, heads, head_dim=width, rope={"mrope_interleaved": True})
    vision = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = _of_images("Qwen3VLConfig", tokenizer, width, text, **vision)
    kind = transformers.Qwen3VLForConditionalGeneration if causal_lm else transformers.Qwen3VLModel
    return tokenizer, kind(config).eval()


@functools.cache
def _without_videos(kind: str) -> Any:
    """A class of processors without videos, which need torchvision."""

    def init(self: Any, image_processor: Any, tokenizer: Any) -> None:
        for name in ("image", "video", "vision_start", "vision_end"):
            token = f"<|{name}_pad|>" if name in ("image", "video") else f"<|{name}|>"
            setattr(self, f"{name}_token", token)
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=tokenizer.chat_template)

    return type(f"{kind}WithoutVideos", (getattr(transformers, kind),), {"__init__": init})


def qwen2_processor(tokenizer: Any) -> Any:
    """A processor that makes every image small: 4 to 6 tokens."""
    images = transformers.Qwen2VLImageProcessorPil(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 6)
    return _without_videos("Qwen2VLProcessor")(images, tokenizer)


def qwen3_processor(tokenizer: Any, largest: int = 6) -> Any:
    """A processor that makes every image small: 4 to `largest` tokens, each of 32 x 32 pixels."""
    sizes = {"min_pixels": 32 * 32 * 4, "max_pixels": 32 * 32 * largest}
    images = transformers.Qwen2VLImageProcessorPil(patch_size=16, **sizes)
    return _without_videos("Qwen3VLProcessor")(images, tokenizer)


def with_processor(encoder: tuple[Any, Any], processor: Any, *args: Any) -> tuple[Any, Any, Any]:
    """The tokenizer, the encoder and a processor with this tokenizer."""
    return *encoder, processor(encoder[0], *args)
