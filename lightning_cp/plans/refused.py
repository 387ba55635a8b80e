"""Classes that no plan can support, and the reason, for the error that `apply_context_parallel` raises."""

_UNET_BLOCK = (
    "it is one block of a UNet: it normalises over all positions of a picture (GroupNorm) and convolves, and its UNet "
    "would have to be split in space"
)

REFUSED = {
    "AnyFlowFARTransformer3DModel": (
        "frames attend block-causally through flex attention over global positions, and write their keys into a cache "
        "by frame; the bidirectional AnyFlowTransformer3DModel is supported"
    ),
    "DreamLiteTransformer2DModel": _UNET_BLOCK,
    "MiniMaxMusic3RVQDepthDecoder": "it decodes at most 16 tokens, one after the other: there is nothing to share",
    "PriorTransformer": "it has some 80 tokens and reads its result off the last one: there is nothing to share",
    "RFD4ProteinaTransformer": (
        "a tensor of all pairs of tokens, updated in every block, outweighs the tokens: it would have to be split in "
        "two dims"
    ),
    "SanaWMTransformer3DModel": (
        "it scans frames one after the other (a gated delta rule in both directions), so each rank would wait for the "
        "one before; SanaVideoTransformer3DModel is supported"
    ),
    "T5FilmDecoder": "it decodes 256 or 512 tokens with T5's attention, which calls none of PyTorch's",
    "Transformer2DModel": f"{_UNET_BLOCK}; DiTTransformer2DModel and PixArtTransformer2DModel are supported",
    "TransformerTemporalModel": f"{_UNET_BLOCK}; its tokens are the few frames of each position",
    "WanAnimate2Transformer3DModel": (
        "tokens are scattered into buffers by their place in a global grid, with flex attention masks over it and a "
        "cache of reference keys; WanAnimateTransformer3DModel is supported"
    ),
}

# Prefixes of diffusers modules; all models in them are refused for the same reason.
REFUSED_MODULES = {
    "diffusers.models.unets.": (
        "it is a UNet: convolutions and GroupNorm over all positions, which would have to be split in space, not a "
        "sequence of tokens"
    )
}
