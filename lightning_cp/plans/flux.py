"""FLUX.1 and FLUX.2: text and image attend to each other from the first block to the last.

Split at the model's own arguments, so that embedders and position tables work on shards too.
"""

from lightning_cp.plans.plan import Plan, split

_INPUTS = {
    "hidden_states": split(1, "image"),
    "encoder_hidden_states": split(1, "text"),
    "img_ids": split(-2, "image"),
    "txt_ids": split(-2, "text"),
}
_CACHE = "its reference tokens are found by their global index"

PLANS = {
    "FluxTransformer2DModel": Plan(
        inputs={
            **_INPUTS,
            "controlnet_block_samples": split(1, "image"),
            "controlnet_single_block_samples": split(1, "image"),
        },
        blocks={"transformer_blocks": {}, "single_transformer_blocks": {}},
        gather={"proj_out": split(1, "image")},
    ),
    "Flux2Transformer2DModel": Plan(
        inputs=_INPUTS,
        blocks={"transformer_blocks": {}, "single_transformer_blocks": {}},
        gather={"proj_out": split(1, "image")},
        refused={"kv_cache_mode": _CACHE, "kv_cache": _CACHE},
    ),
}
