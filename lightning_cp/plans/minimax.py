"""MiniMax: H3 packs video, audio and text into one sequence in any order; Music 3 attends over the audio only.

In Music 3 the timestep is the first audio token. The text refiner of H3 runs on whole tokens, before the blocks.
"""

from lightning_cp.plans.plan import Batch, Plan, patches, split

_LAYOUT = (  # of the packed tokens, the same for all samples
    *("timestep", "timestep_indices", "token_tags", "position_ids"),
    *("video_indices", "audio_indices", "text_indices"),
)

PLANS = {
    "MiniMaxH3Transformer3DModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "packed"),
                "adaln_indices": split(0, "packed"),
                "rotary_emb": split(0, "packed"),
            }
        },
        arguments={"norm_out": {"timestep_indices": split(0, "packed")}},
        gather={"proj_out": split(1, "packed"), "audio_proj_out": split(1, "packed")},
        main="packed",
        patches=patches("packed", once=("token_refiner",)),
        batch=Batch("token_tags", whole=_LAYOUT),
    ),
    "MiniMaxMusic3Transformer1DModel": Plan(
        blocks={"transformer_blocks": {"hidden_states": split(1, "audio"), "rotary_emb": split(0, "audio")}},
        gather={"transformer_blocks.-1": split(1, "audio")},
        main="audio",
        patches=patches("audio"),
    ),
}
