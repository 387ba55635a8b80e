"""HiDream: joint attention over [image | T5 text | last Llama layer | a Llama layer that differs between blocks].

Texts are split at the model's arguments, the image after its embedder. In tensors with all tokens, the texts are
already shards, while the image is still whole.
"""

from lightning_cp.plans.plan import Batch, Plan, split

_ALL = ("image", "t5", "llama", "llama")
_LOCAL_TEXT = split(1, *_ALL, local=("t5", "llama"))

PLANS = {
    "HiDreamImageTransformer2DModel": Plan(
        inputs={"encoder_hidden_states_t5": split(1, "t5"), "encoder_hidden_states_llama3": split(-2, "llama")},
        split_outputs={"x_embedder": split(1, "image"), "pe_embedder": _LOCAL_TEXT},
        blocks={
            "double_stream_blocks": {"hidden_states_masks": split(1, "image")},
            "single_stream_blocks": {"hidden_states_masks": _LOCAL_TEXT},
        },
        attention={"block.attn1": _ALL},
        gather={"final_layer": split(1, "image")},
        batch=Batch("encoder_hidden_states_llama3", dims={"encoder_hidden_states_llama3": 1}),  # [layers, b, s, c]
        unused=("*.experts.*", "*.gate.*"),  # experts that no token selects; in eval mode all of them
    )
}
