"""JoyImage Edit and Edit Plus."""

from __future__ import annotations

from tests.models.tiny import TIMES, Tiny, padding_mask, randn

_JOYIMAGE = {
    "patch_size": [1, 2, 2],
    "in_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "text_dim": 16,
    "num_layers": 2,
    "rope_dim_list": [4, 2, 2],
    "theta": 256,
}


def joyimage(text: int = 7) -> Tiny:
    """JoyImage Edit with a text of so many tokens."""
    return Tiny(
        "JoyImageEditTransformer3DModel",
        _JOYIMAGE,
        lambda g: {
            "hidden_states": randn(g, 2, 4, 1, 6, 10),
            "encoder_hidden_states": randn(g, 2, text, 16),
            "timestep": TIMES * 1000,
        },
    )


def joyimage_plus(text: int = 7) -> Tiny:
    """JoyImage Edit Plus: a target and references of other sizes; the second sample has less of them."""
    return Tiny(
        "JoyImageEditPlusTransformer3DModel",
        _JOYIMAGE,
        lambda g: {
            "hidden_states": randn(g, 2, 19, 4, 1, 2, 2),
            "encoder_hidden_states": randn(g, 2, text, 16),
            "encoder_hidden_states_mask": padding_mask(text - 3 if text > 3 else 1, text),
            "timestep": TIMES * 1000,
            "shape_list": [[(1, 3, 3), (1, 2, 5)], [(1, 3, 3), (1, 1, 4)]],
        },
    )


TINY = {
    "joyimage": joyimage(),
    "joyimage_short_text": joyimage(2),
    "joyimage_items": Tiny(
        "JoyImageEditTransformer3DModel",
        {**_JOYIMAGE, "rope_type": "mrope"},
        lambda g: {**joyimage().inputs(g), "hidden_states": randn(g, 2, 3, 4, 1, 6, 10)},
    ),
    "joyimage_plus": joyimage_plus(),
    "joyimage_plus_short_text": joyimage_plus(2),
    "joyimage_plus_no_mask": Tiny(
        "JoyImageEditPlusTransformer3DModel",
        _JOYIMAGE,
        lambda g: {**joyimage_plus().inputs(g), "encoder_hidden_states_mask": None},
    ),
}
