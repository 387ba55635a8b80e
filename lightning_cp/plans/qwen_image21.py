"""QwenImage 2.1: one packed sequence of text and images, causal except within each image (bidirectional).

Segment boundaries are global indices, so the engine reads them instead of the blocks. With a cache, each rank keeps the
keys of its shard of the tokens before the last image, and later forwards have the tokens of this image only.
"""

from lightning_cp.plans.plan import Attention, Plan, kept, split

_CACHE = "it keeps keys for the later steps of one branch; the pipeline's use_kv_cache=False turns this off"

PLANS = {
    "QwenImage21Transformer2DModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                "rotary_emb": split(0, "image"),
                "target_token_mask": split(0, "image"),
                "cache_write_slice": split(0, "image"),
                "segments": kept("segments"),
                "key_valid": kept("key_valid"),
            }
        },
        attention={
            "attn": Attention(
                ("image",), cached=True, form="block_causal", replaces_processors=("QwenImage21AttnProcessor",)
            )
        },
        gather={"transformer_blocks.-1": split(1, "image")},
        keeps_keys={"kv_cache_mode": _CACHE, "kv_cache": _CACHE},
    )
}
