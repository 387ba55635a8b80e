"""Names that the file of a family imports, all at once: `from lightning_cp.finetune.families.base import *`."""

from __future__ import annotations

from lightning_cp.errors import FamilyError
from lightning_cp.finetune.families.family import (
    Components,
    Facts,
    Family,
    Grid,
    InputOptions,
    Media,
    Sample,
    SideModel,
    Stored,
    TextStorage,
    per_channel,
    stored_latents,
)
from lightning_cp.finetune.families.latents import (
    Latents,
    condition_image,
    latent_mode,
    pack,
    positions,
    to_clips,
    to_images,
)
from lightning_cp.finetune.families.masked_text import MaskedText, MaskedTextPictures, call_default
from lightning_cp.finetune.families.pictures import Pictures
from lightning_cp.finetune.families.schedule import (
    ObjectiveDefaults,
    ResolutionShift,
    diffusion_defaults,
    diffusion_facts,
    scheduler_times,
    shift_facts,
    shift_from,
)
from lightning_cp.finetune.families.video.first_frame import check_more_frames, first_frame_mask
from lightning_cp.finetune.families.video.sound import log_mel, sound_of
from lightning_cp.finetune.family_table import CONTROLNET, VACE, controlnet_error

__all__ = ["CONTROLNET", "Components", "Facts", "Family", "FamilyError", "Grid", "InputOptions", "Latents"]
__all__ += ["MaskedText", "MaskedTextPictures", "Media", "ObjectiveDefaults", "Pictures", "ResolutionShift", "Sample"]
__all__ += ["VACE", "SideModel", "Stored", "TextStorage", "call_default", "check_more_frames", "condition_image"]
__all__ += ["controlnet_error", "diffusion_defaults", "diffusion_facts", "first_frame_mask", "latent_mode", "log_mel"]
__all__ += ["pack", "per_channel", "positions", "scheduler_times", "shift_facts", "shift_from", "sound_of"]
__all__ += ["stored_latents", "to_clips", "to_images"]
