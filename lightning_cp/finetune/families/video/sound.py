"""Recognise clips without sound."""

from __future__ import annotations

from torch import Tensor

from lightning_cp.finetune.families.family import Media

_SILENT = 1e-4  # -80 dB


def sound_of(media: Media, number: int) -> Tensor | None:
    """Return the sound of one sample, [channels, samples] in [-1, 1]; None if there is none, or only silence."""
    sound = media.get("sound")
    if sound is None or not bool((sound[number].abs() > _SILENT).any()):
        return None
    return sound[number].float()
