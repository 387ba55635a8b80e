"""Sound of a clip as log-mel spectrograms."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.finetune.families.family import Media

_SILENT = 1e-4  # -80 dB


def sound_of(media: Media, number: int) -> Tensor | None:
    """Return the sound of one sample, [channels, samples] in [-1, 1]; None if there is none, or only silence."""
    sound = media.get("sound")
    if sound is None or not bool((sound[number].abs() > _SILENT).any()):
        return None
    return sound[number].float()


_WINDOW = 1024  # samples of a spectrum
_LEAST = 1e-5  # smaller magnitudes are raised to it before the logarithm


def log_mel(sound: Tensor, *, rate: int, hop: int, bins: int) -> Tensor:
    """Return the logarithm of mel magnitudes, float32 [b, channels, frames, bins], with samples // hop + 1 frames.

    Hann windows are centred on every `hop`-th sample, and mel filters have Slaney's scale and norm, from 0 to rate / 2.

    Args: sound: [b, channels, samples] in [-1, 1]. rate: samples per second.
    """
    from transformers.audio_utils import mel_filter_bank

    *outer, samples = sound.shape
    window = torch.hann_window(_WINDOW, device=sound.device)
    sound = F.pad(sound.float(), (0, max(0, _WINDOW // 2 + 1 - samples)))  # shorter sound cannot be reflected
    spectra = torch.stft(sound.flatten(0, -2), _WINDOW, hop, window=window, pad_mode="reflect", return_complex=True)
    filters = mel_filter_bank(_WINDOW // 2 + 1, bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    mel = spectra.abs().mT @ torch.from_numpy(filters).to(spectra.device, torch.float32)
    frames = samples // hop + 1
    return mel[:, :frames].clamp(min=_LEAST).log().reshape(*outer, frames, bins)
