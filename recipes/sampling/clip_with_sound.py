"""Write a clip with its sound as MP4."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_cp.files import writing_new
from lightning_cp.recipes.settings.formats import check_sound_format

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
