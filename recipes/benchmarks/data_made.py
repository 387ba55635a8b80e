"""Make what the workload `data` reads: a pipeline with random weights, files of media, and a latent cache."""

from __future__ import annotations

import string
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig
from torch.nn import functional as F

from lightning_cp.finetune.families import Family, family_for
from lightning_cp.finetune.latent_cache import (
    CacheIndex,
    CacheWriter,
    LatentCache,
    MediaRow,
    caption_hash,
    prepare_cache,
)
from lightning_cp.finetune.media import Bucket

_CHARACTERS = [character for character in string.printable if not character.isspace()]
_VOCABULARY = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0), *((c, -2.0) for c in _CHARACTERS)]
_VAE_STRIDE = (4, 8, 8)  # frames, height and width of one latent of Wan's VAE


def make_pipeline(config: DictConfig, transformer: Any) -> tuple[Any, Family]:
    """Make a WanPipeline with random weights for the subject's transformer. Returns: pipeline and family.

    Text has as many positions in a batch as the subject's argument, not the 512 of the published weights.
    """
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline
    from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel  # type: ignore[attr-defined]

    _, channels, *_ = config.inputs.hidden_states
    _, positions, width = config.inputs.encoder_hidden_states
    encoder = UMT5Config(
        vocab_size=len(_VOCABULARY),
        d_model=width,
        d_kv=width // 8,
        num_heads=8,
        d_ff=2 * width,
        num_layers=config.data.text_layers,
        dropout_rate=0.0,
    )
    pipe = WanPipeline(
        tokenizer=T5TokenizerFast(vocab=_VOCABULARY, extra_ids=0, model_max_length=positions),
        text_encoder=UMT5EncoderModel(encoder).eval(),  # type: ignore[no-untyped-call]
        vae=AutoencoderKLWan(
            base_dim=config.data.vae_width, z_dim=channels, latents_mean=[0.0] * channels, latents_std=[1.0] * channels
        ).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer,
    )
    family = family_for(pipe)
    return pipe, type(family)({**family.facts, "text_length": positions})


def media_size(config: DictConfig) -> Bucket:
    """Return the size of media that are encoded to latents with the shape of the subject's argument."""
    *_, frames, height, width = config.inputs.hidden_states
    return Bucket((frames - 1) * _VAE_STRIDE[0] + 1, height * _VAE_STRIDE[1], width * _VAE_STRIDE[2])


def captions(count: int, positions: int) -> list[str]:
    """Return distinct captions with lengths that differ by a factor of 4. Args: positions: most characters."""
    letters = "a red bird sings on the roof of an old house "
    text = letters * (positions // len(letters) + 2)
    lengths = [positions * (1 + i % 4) // 4 for i in range(count)]
    return [f"{i} {text}"[: max(length - 8, 4)].strip() for i, length in enumerate(lengths)]


def write_media(folder: Path, kind: str, count: int, size: Bucket) -> None:
    """Write files that are twice as large as `size`, each with a caption.

    Args:
        folder: created here.
        kind: `pictures`: JPEG by Pillow; `clips`: H.264 at 24 frames a second by PyAV.
    """
    from PIL import Image

    folder.mkdir(parents=True)
    for number in range(count):
        frames = _frames(1 if kind == "pictures" else size.frames, 2 * size.height, 2 * size.width, seed=number)
        file = folder / f"{number:03d}"
        if kind == "pictures":
            Image.fromarray(frames[0]).save(file.with_suffix(".jpg"), quality=90)
        else:
            _write_clip(file.with_suffix(".mp4"), frames)
        file.with_suffix(".txt").write_text(f"{kind} {number}", encoding="utf-8")


def _write_clip(file: Path, frames: Sequence[NDArray[np.uint8]]) -> None:
    import av

    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.height, stream.width, _ = frames[0].shape
        stream.pix_fmt = "yuv420p"
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, 24)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _frames(count: int, height: int, width: int, *, seed: int) -> list[NDArray[np.uint8]]:
    """Draw smooth moving colours with some noise: files of random pixels would be unusually large."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, max(height // 16, 2), max(width // 16, 2) + count, generator=generator)
    frames = []
    for i in range(count):
        view = coarse[..., i : coarse.shape[-1] - count + i + 1]
        smooth = F.interpolate(view, size=(height, width), mode="bilinear")[0]
        noise = torch.rand(3, height, width, generator=generator) / 16
        frames.append(((smooth * 15 / 16 + noise) * 255).byte().permute(1, 2, 0).numpy())
    return frames


def new_writer(folder: Path, family: Family) -> CacheWriter:
    """Begin a cache of a family. Its fingerprint says that it is no data set."""
    prepare_cache(folder, CacheIndex(family.name, family.facts, {"source": "benchmark"}))
    return CacheWriter(folder)


def make_cache(folder: Path, config: DictConfig, family: Family) -> LatentCache:
    """Write a cache of random samples with the shapes of the subject's arguments."""
    _, *shape = config.inputs.hidden_states
    _, positions, width = config.inputs.encoder_hidden_states
    size, generator = media_size(config), torch.Generator().manual_seed(0)
    tokens = family.grid.tokens(shape)
    writer = new_writer(folder, family)
    texts = ["", *captions(config.data.samples, positions)]
    for caption in texts:
        length = min(len(caption) + 1, positions)
        writer.add_text(caption, {"prompt_embeds": torch.randn(length, width, generator=generator).bfloat16()})
    for number, caption in enumerate(texts[1:]):
        row = MediaRow(
            id=f"{number:06d}",
            source=f"{number:06d}.mp4",
            source_hash="0",
            frames=size.frames,
            height=size.height,
            width=size.width,
            tokens=tokens,
            captions=(caption_hash(caption),),
        )
        writer.add_media(row, {"latents": torch.randn(shape, generator=generator)})
    writer.finish()
    return LatentCache(folder)
