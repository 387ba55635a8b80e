"""Stable Audio: self-attention over extra tokens followed by the audio, cross-attention on replicated text.

Version 1 has one extra token, here part of the audio modality. Version 3 has memory tokens, a separate modality:
the inpainting input has audio tokens only. Attention in version 3 is differential: the difference of two attentions.
"""

from lightning_cp.plans.plan import LOCAL, Plan, count, patches, split

PLANS = {
    "StableAudioDiTModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "audio"),
                "attention_mask": split(1, "audio"),
                "rotary_embedding": split(0, "audio"),
            }
        },
        attention={"attn1": ("audio",), "attn2": LOCAL},
        gather={"proj_out": split(1, "audio")},
        main="audio",
        patches=patches("audio"),
    ),
    "StableAudio3DiTModel": Plan(
        blocks={
            "transformer_blocks": {
                "num_memory_tokens": count("memory"),  # listed first: needed to split the other arguments
                "hidden_states": split(1, "memory", "audio"),
                "rope": split(0, "memory", "audio"),
                "local_seq": split(1, "audio"),
            }
        },
        attention={"self_attn": ("memory", "audio"), "cross_attn": LOCAL},
        gather={"transformer_blocks.-1": split(1, "memory", "audio")},
        unused=("prompt_padding_embedding", "transformer_blocks.*.to_local_embed.*"),
        main="audio",
        patches=patches("memory", "audio"),
    ),
}
