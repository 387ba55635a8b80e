"""Write a pipeline's samples as files: pictures, clips or sounds."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from lightning_cp.errors import MediaError
from lightning_cp.files import new_file, writing_new
from lightning_cp.pipelines.prompts import ClipWithSound
from lightning_cp.recipes.settings.formats import check_format, check_sound_format


def frames_of(sample: Any) -> Tensor:
    """Convert a picture or clip to frames: uint8 [frames, height, width, channels], with 1, 3 or 4 channels.

    Args: sample: a PIL image or a list of them, or an array or tensor [h, w, c] or [f, h, w, c], in [0, 1] or uint8.
    Raises: MediaError: anything else.
    """
    if isinstance(sample, Image.Image):
        sample = [sample]
    if isinstance(sample, (list, tuple)) and sample and isinstance(sample[0], Image.Image):
        modes = "RGBA" if sample[0].mode == "RGBA" else "RGB"
        sample = np.stack([np.asarray(image.convert(modes)) for image in sample])
    if isinstance(sample, (np.ndarray, Tensor)):
        pixels = torch.as_tensor(sample).detach().cpu()
        pixels = pixels.unsqueeze(0) if pixels.ndim == 3 else pixels
        if pixels.ndim == 4 and pixels.shape[-1] in (1, 3, 4):
            is_uint8 = pixels.dtype == torch.uint8
            return pixels if is_uint8 else (pixels.float().nan_to_num(0).clamp(0, 1) * 255).round().to(torch.uint8)
    raise MediaError(f"a sample must be a picture [h, w, c] or a clip [f, h, w, c], got a {_describe(sample)}")


def is_sound(sample: Any) -> bool:
    """Return True for a sound: an array or tensor with 1 or 2 dims."""
    return isinstance(sample, (np.ndarray, Tensor)) and sample.ndim in (1, 2)


def write_sample(sample: Any, stem: Path, *, format: str = "auto", fps: int = 16, rate_hz: int = 44100) -> Path:
    """Write one sample to a file.

    Args:
        sample: see `frames_of`; or a `ClipWithSound`, written as MP4 (format=gif: the sound is a WAV file next to it);
            or a sound, an array or tensor [channels, n] or [n] in [-1, 1].
        stem: path without the suffix.
        format: png, gif, mp4 or wav; auto: chosen by the kind of sample.
        fps: frames per second of a clip.
        rate_hz: sampling rate of a sound, in Hz.
    Returns: path of the file. Raises: MediaError: the format cannot hold the sample, or its packages are not installed.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(sample, ClipWithSound):
        return _write_both(sample, stem, format, fps)
    if is_sound(sample) or format == "wav":
        return _write_sound(sample, stem.with_name(f"{stem.name}.wav"), rate_hz)
    frames = frames_of(sample)
    kind = ("png" if len(frames) == 1 else "gif") if format == "auto" else format
    path = stem.with_name(f"{stem.name}.{kind}")
    if kind == "png" and len(frames) > 1:
        raise MediaError(f"format=png holds one picture, but a sample has {len(frames)} frames: use gif, mp4 or auto")
    images = [_image(frame) for frame in frames]
    if kind == "mp4":
        check_format("mp4")  # without imageio, export_to_video falls back to OpenCV
    with writing_new(path):
        if kind == "png":
            images[0].save(path)
            return path
        from diffusers.utils import export_to_gif, export_to_video

        if kind == "gif":
            export_to_gif(images, str(path), fps=fps)
        else:
            export_to_video([image.convert("RGB") for image in images], str(path), fps=fps, macro_block_size=2)
    return path


def keep_arrays(sample: Any, path: Path) -> None:
    """Write the values of any sample as NumPy arrays (`.npz`), without a conversion that could fail."""
    parts = (
        {"frames": sample.frames, "sound": sample.sound} if isinstance(sample, ClipWithSound) else {"sample": sample}
    )
    arrays = {name: x.detach().float().cpu() if isinstance(x, Tensor) else x for name, x in parts.items()}
    values: dict[str, Any] = {name: np.asarray(x) for name, x in arrays.items()}
    np.savez(new_file(path), **values)


def _write_both(sample: ClipWithSound, stem: Path, format: str, fps: int) -> Path:
    if format == "gif":
        write_sample(sample.sound, stem, rate_hz=sample.rate_hz)
        return write_sample(sample.frames, stem, format=format, fps=fps)
    frames, path = frames_of(sample.frames), stem.with_name(f"{stem.name}.mp4")
    if format == "png":
        raise MediaError("format=png holds one picture, but a sample is a clip with sound: use mp4, gif or auto")
    sound = torch.as_tensor(sample.sound)
    channels = sound.unsqueeze(0) if sound.ndim == 1 else sound
    write_clip_with_sound(frames, channels, path, fps=fps, rate_hz=sample.rate_hz)
    return path


def _describe(sample: Any) -> str:
    shape = f" of shape {tuple(sample.shape)}" if hasattr(sample, "shape") else ""
    return f"{type(sample).__name__}{shape}"


def _image(frame: Tensor) -> Image.Image:
    array = frame.numpy()
    return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)


def _write_sound(sample: Any, path: Path, rate_hz: int) -> Path:
    if not is_sound(sample):
        raise MediaError(f"format=wav needs a sound [channels, n], got a {_describe(sample)}: use format=auto")
    values = torch.as_tensor(sample).detach().float().cpu().nan_to_num(0).clamp(-1, 1)
    channels = values.unsqueeze(0) if values.ndim == 1 else values
    with writing_new(path), wave.open(str(path), "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes((channels.T * 32767).round().to(torch.int16).numpy().tobytes())
    return path


_LAYOUTS = {1: "mono", 2: "stereo"}


def write_clip_with_sound(frames: Tensor, sound: Tensor, path: Path, *, fps: int, rate_hz: int) -> None:
    """Encode H.264 and AAC into one file.

    Args:
        frames: uint8 [f, h, w, c] with 1, 3 or 4 channels. An odd height or width gets one more row or column.
        sound: [channels, n] in [-1, 1], with 1 or 2 channels.
    Raises: MediaError: PyAV is not installed. ValueError: more than 2 channels.
    """
    check_sound_format()
    import av

    if len(sound) not in _LAYOUTS:
        raise ValueError(f"a sound in a clip must have 1 or 2 channels, got {len(sound)}")
    height, width = frames.shape[1:3]
    rgb = frames[..., :3].expand(-1, -1, -1, 3).movedim(-1, 1).float()
    even = pad(rgb, (0, width % 2, 0, height % 2), mode="replicate").to(torch.uint8).movedim(1, -1).contiguous()
    samples = sound.detach().float().cpu().nan_to_num(0).clamp(-1, 1).contiguous()
    with writing_new(path), av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=fps, options={"crf": "18"})
        video.height, video.width, video.pix_fmt = even.shape[1], even.shape[2], "yuv420p"
        audio = container.add_stream("aac", rate=rate_hz, layout=_LAYOUTS[len(sound)])
        for picture in even:
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture.numpy(), format="rgb24")))
        container.mux(video.encode(None))
        heard = av.AudioFrame.from_ndarray(samples.numpy(), format="fltp", layout=_LAYOUTS[len(sound)])
        heard.sample_rate = rate_hz
        container.mux(audio.encode(heard))
        container.mux(audio.encode(None))
