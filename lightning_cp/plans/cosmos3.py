"""Cosmos 3: causal self-attention of the text; generated tokens attend to the text and to themselves.

Both modalities are packed without a batch dim: [tokens, channels].
"""

from lightning_cp.plans.plan import Attention, Batch, Plan, split

_TEXT, _GENERATED = split(0, "text"), split(0, "generated")

PLANS = {
    "Cosmos3OmniTransformer": Plan(
        blocks={
            "layers": {"und_seq": _TEXT, "gen_seq": _GENERATED, "rotary_emb": (_TEXT, _TEXT, _GENERATED, _GENERATED)}
        },
        attention={"self_attn": (Attention(("text",)), Attention(("generated",), keys=("text", "generated")))},
        gather={"norm": _TEXT, "norm_moe_gen": _GENERATED},
        main="generated",
        batch=Batch("text_indexes", single="Cosmos 3 computes one sample at a time"),
        unused=("lm_head.*",),
    )
}
