"""LongCat-AudioDiT: masked self-attention over the audio, cross-attention on replicated, masked text.

The tokens are gathered before the long skip connection, which adds the input of the first block.
"""

from lightning_cp.plans.plan import LOCAL, Plan, patches, split

PLANS = {
    "LongCatAudioDiTTransformer": Plan(
        blocks={"blocks": {"hidden_states": split(1, "audio"), "mask": split(1, "audio"), "rope": split(0, "audio")}},
        attention={"self_attn": ("audio",), "cross_attn": LOCAL},
        gather={"blocks.-1": split(1, "audio")},
        main="audio",
        unused=("latent_embed.*", "latent_cond_embedder.*"),
        patches=patches("audio", overlaps=False),
    )
}
