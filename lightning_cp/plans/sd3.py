"""Stable Diffusion 3 and 3.5: joint attention; 3.5 has a second one over the image alone.

With an IP-Adapter the image attends to [image | picture], where picture is the adapter's image prompt, also split."""

from lightning_cp.plans.plan import Attention, Plan, patches, split

_ADAPTER = Attention(("image",), ("image", "picture"))

PLANS = {
    "SD3Transformer2DModel": Plan(
        inputs={"block_controlnet_hidden_states": split(1, "image")},
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                "encoder_hidden_states": split(1, "text"),
                "joint_attention_kwargs": {"ip_hidden_states": split(1, "picture")},
            }
        },
        attention={"attn": (Attention(("image", "text")), _ADAPTER), "attn2": (Attention(("image",)), _ADAPTER)},
        gather={"proj_out": split(1, "image")},
        patches=patches("image", "text"),
    )
}
