"""Z-Image."""

from __future__ import annotations

from tests.models.tiny import TIMES, Tiny, randn

_KIND = "ZImageTransformer2DModel"
_Z_IMAGE = {
    "in_channels": 16,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 4,
    "n_kv_heads": 4,
    "cap_feat_dim": 16,
    "axes_dims": [4, 2, 2],
    "axes_lens": [128, 32, 32],
}

# The class pads every image and text to 32 tokens, so that sequences have 64 or 128: not divisible by 3.
TINY = {
    "z_image": Tiny(
        _KIND,
        _Z_IMAGE,
        lambda g: {
            "x": [randn(g, 16, 1, 6, 10), randn(g, 16, 1, 10, 14)],
            "t": TIMES,
            "cap_feats": [randn(g, 7, 16), randn(g, 39, 16)],
        },
    ),
    "z_image_controlnet": Tiny(
        _KIND,
        _Z_IMAGE,
        lambda g: {
            "x": [randn(g, 16, 1, 6, 10), randn(g, 16, 1, 10, 6)],
            "t": TIMES,
            "cap_feats": [randn(g, 7, 16), randn(g, 13, 16)],
            "controlnet_block_samples": {i: randn(g, 2, 64, 32) for i in range(2)},
        },
    ),
    "z_image_omni": Tiny(
        _KIND,
        _Z_IMAGE,
        lambda g: {
            "x": [[randn(g, 16, 1, 6, 10), randn(g, 16, 1, 6, 6)], [randn(g, 16, 1, 10, 6)]],
            "t": TIMES,
            "cap_feats": [[randn(g, 7, 16), randn(g, 5, 16)], [randn(g, 13, 16)]],
            "siglip_feats": [None, None],
            "image_noise_mask": [[0, 1], [1]],
        },
    ),
    "z_image_siglip": Tiny(
        _KIND,
        {**_Z_IMAGE, "siglip_feat_dim": 8},
        lambda g: {
            "x": [[randn(g, 16, 1, 6, 10), randn(g, 16, 1, 6, 6)], [None, randn(g, 16, 1, 10, 6)]],
            "t": TIMES,
            "cap_feats": [[randn(g, 7, 16), randn(g, 5, 16)], [randn(g, 13, 16), randn(g, 9, 16), randn(g, 3, 16)]],
            "siglip_feats": [[randn(g, 3, 5, 8), randn(g, 3, 3, 8)], [None, randn(g, 5, 3, 8)]],
            "image_noise_mask": [[0, 1], [0, 1]],
        },
    ),
}
