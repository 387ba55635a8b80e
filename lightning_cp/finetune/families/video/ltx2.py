"""LTX-2: a clip and its sound, from text or from a first frame.

The transformer takes tokens of both, with one time, and text after the connectors, which are frozen. Positions along
time are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.base import *
from lightning_cp.finetune.families.video.ltx import LTX, FirstFrame, pack_tokens, unpack_tokens


class LTX2(LTX):
    """LTX-2, text to video and sound.

    `encode_media` takes "fps" [b] and "sound" [b, 2, samples] besides "pixels". Clips without sound, or with silence,
    are stored with the latents of silence, which enter the transformer but have no loss.
    """

    name = "ltx2"
    pipelines = ("LTX2Pipeline",)
    widths = ("in_channels", "caption_channels", "audio_in_channels")
    components = Components(
        text=("text_encoder", "tokenizer", "connectors"),
        media=("vae", "audio_vae"),
        after_encode_prompt=("connectors",),
    )
    text_length = 1024
    default_frames = 121
    outputs = 2
    entries = ("hidden_states", "audio_hidden_states")

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        transformer, vae = pipe.transformer.config, pipe.audio_vae
        return {
            **super().read_facts(pipe),
            "sound_rate": vae.config.sample_rate,
            "sound_hop": vae.config.mel_hop_length,
            "sound_bins": vae.config.mel_bins,
            "sound_temporal": vae.temporal_compression_ratio,
            "sound_mean": vae.latents_mean.tolist(),
            "sound_std": vae.latents_std.tolist(),
            "position_scales": list(transformer.vae_scale_factors),
            "sound_position_scale": transformer.audio_scale_factor,
            "sound_position_hop": transformer.audio_hop_length,
            "sound_position_rate": transformer.audio_sampling_rate,
            "causal_offset": transformer.causal_offset,
            # from 2.3 on, attention between clip and sound is modulated by the time of the other one
            "cross_timestep": bool(transformer.cross_attn_mod or transformer.audio_cross_attn_mod),
        }

    @property
    @override
    def text(self) -> TextStorage:
        names = ("prompt_embeds", "audio_prompt_embeds")
        return TextStorage("padded", self.facts["text_length"], sequences=names, others=("text_mask",))

    @property
    @override
    def sound_rate(self) -> int | None:
        rate: int = self.facts["sound_rate"]
        return rate

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        states, mask, _, _ = pipe.encode_prompt(
            list(captions), do_classifier_free_guidance=False, max_sequence_length=self.facts["text_length"]
        )
        encoded = pipe.connectors(states, mask, padding_side=pipe.tokenizer.padding_side)
        names = ("prompt_embeds", "audio_prompt_embeds", "text_mask")
        return [dict(zip(names, (x, y, kept.bool()), strict=True)) for x, y, kept in zip(*encoded, strict=True)]

    @override
    def encode_media(self, pipe: Any, media: Media) -> list[Sample]:
        samples, frames = super().encode_media(pipe, media), media["pixels"].shape[2]
        return [
            {**sample, **self._encode_sound(pipe.audio_vae, sound_of(media, i), frames / float(sample["fps"]))}
            for i, sample in enumerate(samples)
        ]

    def _encode_sound(self, vae: Any, sound: Tensor | None, duration_s: float) -> Sample:
        facts = self.facts
        waveform = torch.zeros(2, round(duration_s * facts["sound_rate"]))
        if sound is not None:
            samples = min(sound.shape[-1], waveform.shape[-1])
            waveform[:, :samples] = sound[:, :samples]
        mel = log_mel(waveform[None], rate=facts["sound_rate"], hop=facts["sound_hop"], bins=facts["sound_bins"])
        length = round(duration_s * (facts["sound_rate"] / facts["sound_hop"] / float(facts["sound_temporal"])))
        latents = latent_mode(vae, mel)[0, :, :length]  # the encoder is causal: later latents change nothing
        return {"sound": latents, "sound_loss_mask": torch.full([1, 1, 1], 0.0 if sound is None else 1.0)}

    @override
    def clean(self, stored: Stored, noise: Any = None) -> Any:
        sound = stored["sound"].float()
        mean, std = (
            per_channel(self.facts[name], sound, dim=-1).view(1, sound.shape[1], 1, sound.shape[3])
            for name in ("sound_mean", "sound_std")
        )
        return {"video": self.normalised(stored["latents"]), "sound": (sound - mean) / std}

    @override
    def decoded(self, pipe: Any, stored: Stored) -> dict[str, Tensor]:
        mel = pipe.audio_vae.decode(stored["sound"].to(pipe.audio_vae.dtype), return_dict=False)[0]
        return {**super().decoded(pipe, stored), "audio": pipe.vocoder(mel)}

    @override
    def inputs(self, noisy: Any, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        video, sound = noisy["video"], noisy["sound"]
        b, _, frames, height, width = video.shape
        timestep, mask = scheduler_times(times), stored["text_mask"]
        return {
            "hidden_states": pack_tokens(video).to(options.dtype),
            "audio_hidden_states": sound.transpose(1, 2).flatten(2).to(options.dtype),
            "encoder_hidden_states": stored["prompt_embeds"].to(options.dtype),
            "audio_encoder_hidden_states": stored["audio_prompt_embeds"].to(options.dtype),
            "timestep": timestep,
            "sigma": timestep,
            "encoder_attention_mask": mask,
            "audio_encoder_attention_mask": mask,
            "num_frames": frames,
            "height": height,
            "width": width,
            "fps": stored["fps"],
            "audio_num_frames": sound.shape[2],
            "video_coords": self._video_positions(frames, height, width, stored["fps"]),
            "audio_coords": self._sound_positions(sound.shape[2], sound.device).expand(b, 1, -1, -1),
            "isolate_modalities": False,
            "use_cross_timestep": self.facts["cross_timestep"],
            "return_dict": False,
        }

    @override
    def prediction(self, output: Any, noisy: Any) -> Any:
        video, sound = output
        _, channels, _, bins = noisy["sound"].shape
        return {
            "video": unpack_tokens(video, noisy["video"]),
            "sound": sound.unflatten(2, (channels, bins)).transpose(1, 2),
        }

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        off = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}  # only CFG, not LTX-2's other guidance
        return {
            **super().call_arguments(media),
            **off,
            **{f"audio_{name}": value for name, value in off.items()},
            "use_cross_timestep": self.facts["cross_timestep"],
        }

    def _video_positions(self, frames: int, height: int, width: int, fps: Tensor) -> Tensor:
        """Return where each token begins and ends, in seconds and pixels: [b, 3, tokens, 2]."""
        scales, device = self.facts["position_scales"], fps.device
        axes = [torch.arange(n, device=device, dtype=torch.float32) for n in (frames, height, width)]
        cells = torch.cartesian_prod(*axes).mT.unsqueeze(-1)
        spans = torch.cat([cells, cells + 1], dim=-1)
        seconds = self._causal(spans[0] * scales[0], scales[0]) / fps.view(-1, 1, 1)
        pixels = [(spans[i] * scales[i]).expand_as(seconds) for i in (1, 2)]
        return torch.stack([seconds, *pixels], dim=1)

    def _sound_positions(self, length: int, device: torch.device) -> Tensor:
        """Return where each latent of the sound begins and ends, in seconds: [tokens, 2]."""
        scale, begin = self.facts["sound_position_scale"], torch.arange(length, device=device, dtype=torch.float32)
        spans = self._causal(torch.stack([begin, begin + 1], dim=-1) * scale, scale)
        seconds: Tensor = spans * self.facts["sound_position_hop"] / self.facts["sound_position_rate"]
        return seconds

    def _causal(self, positions: Tensor, scale: int) -> Tensor:
        """Move positions so that the first latent has one frame, and begins at 0."""
        moved: Tensor = positions + self.facts["causal_offset"] - scale
        return moved.clamp(min=0)


class LTX2ImageToVideo(LTX2, FirstFrame):
    """LTX-2, image to video and sound. The first frame of each clip in "pixels" is the condition."""

    name = "ltx2_image_to_video"
    pipelines = ("LTX2ImageToVideoPipeline",)

    @override
    def inputs(self, noisy: Any, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        given = {**noisy, "video": self.with_first_frame(noisy["video"], stored)}
        arguments = super().inputs(given, times, stored, options)
        timestep = arguments["timestep"]
        return {**arguments, "timestep": self.token_times(timestep, given["video"]), "audio_timestep": timestep}

    @override
    def given_mask(self, stored: Stored, clean: Any) -> Latents | None:
        return {"video": first_frame_mask(clean["video"])}

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        # stored conditions are not compressed
        return {**super().call_arguments(media), "image": condition_image(media["pixels"]), "image_crf": 0}
