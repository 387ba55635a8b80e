"""MiniMax-H3: a clip and its sound, from text.

The transformer takes one sequence of text, sound and clip, and returns velocities towards the data. The pipeline has a
scheduler for the clip and one for the sound, so their times differ within a sample. Samples of a call would share
positions and times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.comm.background import to_device
from lightning_cp.finetune.families.base import *

_NO_CAPTION = " "  # an empty text has no tokens, and the text encoder needs one
_LAYOUT = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")


class MiniMaxH3(Family):
    """MiniMax-H3, text to video and sound.

    `encode_media` takes "sound" [b, 2, samples] besides "pixels" at 24 frames per second. Clips without sound, or with
    silence, are stored with the latents of silence, which enter the transformer but have no loss.
    """

    name = "minimax_h3"
    pipelines = ("MiniMaxH3ModularPipeline",)
    widths, packs_sound = ("in_channels", "text_dim", "audio_in_channels"), False
    components = Components(text=("text_encoder", "tokenizer", "processor"), media=("vae", "audio_vae"))
    takes_video = True
    outputs = 2
    entries = ("hidden_states", "audio_hidden_states")
    default_frames = 124
    least_sampled = 124  # 5 seconds
    counts_end = True
    one_per_call = True
    one_prompt = True
    picture = ""  # text to video only: the pipeline draws without one

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        vae, audio_vae = pipe.vae, pipe.audio_vae
        return {
            "spatial": vae.spatial_compression_ratio,
            "frames_per_chunk": vae.config.clip_length,
            "latents_per_chunk": vae.tokens_chunk_size,
            "patch": list(pipe.patch_size),
            "pixel_mean": list(pipe.pixel_mean),
            "pixel_std": list(pipe.pixel_std),
            "latents_mean": list(vae.config.latents_mean),
            "latents_std": list(vae.config.latents_std),
            "fps": pipe.fps,
            "sound_rate": audio_vae.config.sampling_rate,
            "sound_hop": audio_vae.hop_length,
            "sound_mean": list(audio_vae.config.latents_mean),
            "sound_std": list(audio_vae.config.latents_std),
            "tags": {"text": pipe.text_tag, "video": pipe.video_tag, "audio": pipe.audio_tag},
            "shift": shift_facts(pipe.scheduler),
            "sound_shift": shift_facts(pipe.audio_scheduler),
        }

    @property
    @override
    def grid(self) -> Grid:
        chunk, rest = self.facts["frames_per_chunk"], self.facts["latents_per_chunk"]
        patch = tuple(self.facts["patch"])
        # the VAE decodes n chunks and a rest, but not a rest alone
        return Grid(self.facts["spatial"] * patch[1], chunk, patch, least_frames=chunk + rest)

    @property
    @override
    def objective(self) -> ObjectiveDefaults:
        return ObjectiveDefaults(shift=self.facts["shift"], posterior="sample")

    @property
    @override
    def text(self) -> TextStorage:
        return TextStorage("masked", length=1024)

    @property
    @override
    def sound_rate(self) -> int | None:
        rate: int = self.facts["sound_rate"]
        return rate

    @override
    def default_sides(self, pipe: Any) -> Mapping[str, int]:
        from diffusers.modular_pipelines.minimax_h3.modular_pipeline import resolve_canvas_size

        canvas = pipe.config.canvas_short_edge, pipe.config.canvas_max_pixels
        return dict(zip(("height", "width"), resolve_canvas_size(16, 9, self.grid.pixels, *canvas), strict=True))

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds

        encoder, samples = pipe.text_encoder, list[Sample]()
        for caption in captions:
            ids = pipe.tokenizer(caption or _NO_CAPTION, add_special_tokens=False)["input_ids"]
            settings = {"text_encoder_layer": pipe.text_encoder_layer, "device": encoder.device, "dtype": encoder.dtype}
            samples.append({"prompt_embeds": get_qwen3vl_prompt_embeds(encoder, pipe.processor, ids, **settings)[0]})
        return samples

    @override
    def encode_media(self, pipe: Any, media: Media) -> list[Sample]:
        pixels = media["pixels"]
        frames, fps = pixels.shape[2], media.get("fps")
        self.check_size(height=pixels.shape[-2], width=pixels.shape[-1], frames=frames)
        if fps is not None and bool((fps != self.facts["fps"]).any()):
            rate = self.facts["fps"]
            raise FamilyError(f"{self.name} has clips of {rate} frames per second, got {fps[0]:g}: set fps={rate}")
        mean, std = (per_channel(self.facts[name], pixels) for name in ("pixel_mean", "pixel_std"))
        latents = pipe.vae.encode((((pixels.float() + 1) / 2 - mean) / std).to(pipe.vae.device)).latent_dist
        return [
            {"latents": x, "latents_std": y, **self._encode_sound(pipe.audio_vae, sound_of(media, i), frames)}
            for i, (x, y) in enumerate(zip(latents.mode(), latents.std, strict=True))
        ]

    def _encode_sound(self, vae: Any, sound: Tensor | None, frames: int) -> Sample:
        from diffusers.modular_pipelines.minimax_h3.modular_pipeline import audio_latent_num_frames

        waveform = torch.zeros(2, audio_latent_num_frames(frames) * self.facts["sound_hop"])
        if sound is not None:
            samples = min(sound.shape[-1], waveform.shape[-1])
            waveform[:, :samples] = sound[:, :samples]
        latents = vae.encode(waveform[:, None].to(vae.device)).latent_dist.mode()  # channels are in the batch dim
        return {"sound": latents.mT, "sound_loss_mask": torch.full([1, 1, 1], 0.0 if sound is None else 1.0)}

    @override
    def clean(self, stored: Stored, noise: Any = None) -> Any:
        latents = stored_latents(stored, None if noise is None else noise["video"])
        video = [per_channel(self.facts[name], latents) for name in ("latents_mean", "latents_std")]
        sound = [per_channel(self.facts[name], stored["sound"], dim=-1) for name in ("sound_mean", "sound_std")]
        return {"video": (latents - video[0]) / video[1], "sound": (stored["sound"].float() - sound[0]) / sound[1]}

    @override
    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        mean, std = (per_channel(self.facts[name], latents) for name in ("pixel_mean", "pixel_std"))
        pixels: Tensor = vae.decode(latents.to(vae.device), return_dict=False)[0].float().to(latents.device)
        return (pixels * std + mean).clamp(0, 1)

    @override
    def decoded(self, pipe: Any, stored: Stored) -> dict[str, Tensor]:
        sound = pipe.audio_vae.decode(stored["sound"][0].mT, return_dict=False)[0]
        return {**super().decoded(pipe, stored), "audio": sound.float().transpose(0, 1)}

    @override
    def pipeline_times(self, pipe: Any, step: int) -> Latents:
        schedulers = {"video": pipe.scheduler, "sound": pipe.audio_scheduler}
        return {name: 1 - one.timesteps[step].double() for name, one in schedulers.items()}

    @override
    def latent_times(self, times: Tensor) -> Latents:
        # both schedulers shift one unshifted time, so the sound's is the clip's with the ratio of the shifts
        ratio, sigma = self.facts["sound_shift"] / self.facts["shift"], times.double()
        return {"video": times, "sound": (ratio * sigma / (1 + (ratio - 1) * sigma)).to(times.dtype)}

    @override
    def inputs(self, noisy: Any, times: Any, stored: Stored, options: InputOptions) -> dict[str, Any]:
        video, sound, text = noisy["video"], noisy["sound"], stored["prompt_embeds"]
        mask = stored.get("prompt_mask")
        if mask is not None:  # positions of the clip and its sound follow those of the text
            text = text[:, mask[0]]
        layout = self._layout(text.shape[1], video.shape[2:], sound.shape[2], video.device)
        clean = {name: (1 - time.double()).float() for name, time in times.items()}  # 1 is clean
        rows = clean["video"].expand(len(layout["token_tags"])).clone()  # the text has the clip's
        rows[layout["audio_indices"]] = clean["sound"]
        timestep, indices = torch.unique(rows, sorted=True, return_inverse=True)
        return {
            "hidden_states": _packed(video, self.facts["patch"]),
            "audio_hidden_states": sound.flatten(1, 2),
            "encoder_hidden_states": text.to(options.dtype),
            "timestep": timestep,
            "timestep_indices": indices,
            **layout,
            "return_dict": False,
        }

    def _layout(self, texts: int, size: Sequence[int], sounds: int, device: torch.device) -> dict[str, Tensor]:
        """Return positions, modalities and indices of the tokens. Args: size: frames, height and width of latents."""
        from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

        tags = self.facts["tags"]
        layout = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            torch.full([texts], tags["text"]),
            *size,
            sounds,
            patch_size=tuple(self.facts["patch"]),
            audio_channels=2,
            audio_tag=tags["audio"],
            video_tag=tags["video"],
        )
        return {name: to_device(x, device) for name, x in zip(_LAYOUT, layout, strict=False)}

    @override
    def prediction(self, output: Any, noisy: Any) -> Any:
        video, sound = output
        return {
            "video": -_unpacked(video, noisy["video"], self.facts["patch"]),
            "sound": -sound.unflatten(1, noisy["sound"].shape[1:3]),
        }


def _packed(latents: Tensor, patch: Sequence[int]) -> Tensor:
    """Join patches to tokens: [b, c, f, h, w] -> [b, tokens, values of c and of a patch]."""
    b, c, *sizes = latents.shape
    cells = [side for n, size in zip(sizes, patch, strict=True) for side in (n // size, size)]
    return latents.reshape(b, c, *cells).permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def _unpacked(tokens: Tensor, like: Tensor, patch: Sequence[int]) -> Tensor:
    cells = [n // size for n, size in zip(like.shape[2:], patch, strict=True)]
    split = tokens.reshape(len(tokens), *cells, like.shape[1], *patch)
    return split.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(like.shape)
