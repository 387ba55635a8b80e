"""ACE-Step: self-attention over the audio, every second layer's in a sliding window, and cross-attention on whole text.

The window comes as a mask of all tokens to all, of which a rank keeps its rows; with flash attention, as a setting of
the backend, and only where more keys than it holds are seen.
"""

from lightning_cp.plans.plan import LOCAL, Plan, mask, split

PLANS = {
    "AceStepTransformer1DModel": Plan(
        blocks={
            "layers": {
                "hidden_states": split(1, "audio"),
                "position_embeddings": split(0, "audio"),
                "attention_mask": mask("audio"),
            },
        },
        attention={"self_attn": ("audio",), "cross_attn": LOCAL},
        gather={"layers.-1": split(1, "audio")},
        main="audio",
        refused_backends={"flash": "with it the model makes no mask, and leaves its window to the backend"},
    ),
}
