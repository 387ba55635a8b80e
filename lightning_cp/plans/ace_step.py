"""ACE-Step: self-attention over the audio (sliding window in every second layer), cross-attention on replicated text.

The window is a full mask [tokens, tokens], and each rank keeps the part of its queries. With flash attention the window
is a setting of the backend instead, set only if the number of keys exceeds the window size.
"""

from lightning_cp.plans.plan import LOCAL, Plan, mask, patches, split

PLANS = {
    "AceStepTransformer1DModel": Plan(
        blocks={
            "layers": {
                "hidden_states": split(1, "audio"),
                "position_embeddings": split(0, "audio"),
                "attention_mask": mask("audio"),
            }
        },
        attention={"self_attn": ("audio",), "cross_attn": LOCAL},
        gather={"layers.-1": split(1, "audio")},
        main="audio",
        refused_backends={"flash": "with it the model makes no mask, and leaves its window to the backend"},
        patches=patches("audio"),
    )
}
