"""Stable Audio: self-attention over the audio with tokens in front of it, cross-attention on replicated text.

Version 1 has one token in front, which is part of the audio here. Version 3 has memory tokens, a stream of their own,
since what is given for inpainting belongs to the audio alone; its attention is the difference of two.
"""

from lightning_cp.plans.plan import LOCAL, Plan, count, split

PLANS = {
    "StableAudioDiTModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "audio"),
                "attention_mask": split(1, "audio"),
                "rotary_embedding": split(0, "audio"),
            },
        },
        attention={"attn1": ("audio",), "attn2": LOCAL},
        gather={"proj_out": split(1, "audio")},
        main="audio",
    ),
    "StableAudio3DiTModel": Plan(
        blocks={
            "transformer_blocks": {
                "num_memory_tokens": count("memory"),  # first, since it tells how the others are divided
                "hidden_states": split(1, "memory", "audio"),
                "rope": split(0, "memory", "audio"),
                "local_seq": split(1, "audio"),
            },
        },
        attention={"self_attn": ("memory", "audio"), "cross_attn": LOCAL},
        gather={"transformer_blocks.-1": split(1, "memory", "audio")},
        unused=(
            "prompt_padding_embedding",
            "transformer_blocks.*.to_local_embed.*",
        ),
        main="audio",
    ),
}
