"""PRX. Its cleaning of prompts needs ftfy, which is not installed: it is given texts that are encoded already."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import PRXPipeline
from transformers import T5GemmaModuleConfig
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import asked, flow_match, loud, quiet
from tests.pipelines.text.gemma import gemma_tokenizer
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (48, 80)  # 3 x 5 tokens: the autoencoder makes it 8 times smaller, and the transformer sees patches of 2 x 2
_WIDTH, _TOKENS = 16, 13


def _make() -> Any:
    tokenizer = gemma_tokenizer(_TOKENS)
    text_encoder = T5GemmaEncoder(
        T5GemmaModuleConfig(
            vocab_size=len(tokenizer),
            hidden_size=_WIDTH,
            intermediate_size=2 * _WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            dropout_rate=0.0,
        )
    )
    transformer = MODELS["prx"].make()
    with quiet():
        return PRXPipeline(
            scheduler=flow_match(shift=3.0),
            vae=vaes.kl(_LATENTS, levels=4),
            text_encoder=text_encoder.eval(),
            tokenizer=tokenizer,
            transformer=loud(transformer),
        )


def _inputs() -> dict[str, Any]:
    g = torch.Generator().manual_seed(4)
    kept = torch.arange(_TOKENS)[None]
    return asked(
        *_SIZE,
        prompt=None,
        prompt_embeds=torch.randn(1, _TOKENS, _WIDTH, generator=g),
        prompt_attention_mask=kept < 11,
        negative_prompt_embeds=torch.randn(1, _TOKENS, _WIDTH, generator=g),
        negative_prompt_attention_mask=kept < 6,
        guidance_scale=5.0,
        use_resolution_binning=False,
    )


TINY = {"prx": TinyPipe(_make, _inputs, guidance="batch")}
