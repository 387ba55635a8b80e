"""Bria, FIBO and FIBO 2. Bria and FIBO attend like FLUX; FIBO gives each block another layer of the text encoder.

FIBO 2 has one modality, [text gist | image | references], or with a padded gist [image | references | text gist].
Its noise refiners run before the gist is added.
"""

from dataclasses import replace

from lightning_cp.plans.flux import FLUX, INPUTS, MASK
from lightning_cp.plans.plan import LOCAL, Plan, mask, split

PLANS = {
    "BriaTransformer2DModel": replace(
        FLUX,
        inputs={**INPUTS, "attention_kwargs": MASK, "controlnet_block_samples": split(1, "image")},
        refused={"controlnet_single_block_samples": "they are added to image tokens found by their global index"},
    ),
    "BriaFiboTransformer2DModel": replace(FLUX, inputs={**FLUX.inputs, "text_encoder_layers": split(1, "text")}),
    "BriaFibo2Transformer2DModel": Plan(
        blocks={
            "noise_refiner": {"x": split(1, "image"), "freqs_cis": split(1, "image"), "noise_mask": split(1, "image")},
            "layers": {
                "x": split(1, "all"),
                "attn_mask": mask("all"),
                "freqs_cis": split(1, "all"),
                "noise_mask": split(1, "all"),
            },
        },
        attention={
            "noise_refiner.attention": ("image",),
            "layers.attention": ("all",),
            "layers.cross_attention": LOCAL,
        },
        gather={"noise_refiner.-1": split(1, "image"), "layers.-1": split(1, "all")},
    ),
}
