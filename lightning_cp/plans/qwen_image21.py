"""QwenImage 2.1: one packed sequence of text and images, causal except within each image (bidirectional).

Segment boundaries are global indices, so the engine reads them instead of the blocks.
"""

from lightning_cp.plans.plan import Attention, Plan, kept, split

_CACHE = "the prefix that it holds is found by its global index"

PLANS = {
    "QwenImage21Transformer2DModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                "rotary_emb": split(0, "image"),
                "target_token_mask": split(0, "image"),
                "segments": kept("segments"),
                "key_valid": kept("key_valid"),
            },
        },
        attention={
            "attn": Attention(("image",), form="block_causal", replaces_processors=("QwenImage21AttnProcessor",))
        },
        gather={"transformer_blocks.-1": split(1, "image")},
        refused={"kv_cache": _CACHE, "kv_cache_mode": _CACHE},
    ),
}
