"""Decode the frames of a video with PyAV, upright and in RGB, and choose those of a clip by their times."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_cp.compat.versions import needs
from lightning_cp.errors import MediaError
from lightning_cp.files import check_regular
from lightning_cp.finetune.media.limits import FRAME_PIXELS

CLOCK_S = 1e-3  # precision of times: Matroska and FLV round them to milliseconds
_BT709, _UNSPECIFIED, _BT601 = 1, 2, 6  # AVColorSpace
_HDR = {16: "PQ", 18: "HLG"}  # AVColorTransferCharacteristic
_SWSCALE = 4 | 0x2000 | 0x40000  # bicubic, full chroma interpolation, accurate rounding
_LIMITED = {"max_pixels": str(FRAME_PIXELS)}  # FFmpeg allocates no larger frames
_SEEK_BACK_S = (0.0, 1.0, 4.0, 16.0)
# Times are wrong after a jump: AVI has no presentation times, and in MPEG program streams not each frame has one.
_FORMATS = "3gp,asf,avi,flv,gif,matroska,webm,mov,mp4,m4a,3g2,mj2,mpeg,mpegts,mpegvideo,ogg"
_NOT_SEEKABLE = ("avi", "mpeg")


@dataclass(frozen=True)
class Frame:
    """A decoded frame.

    Args:
        time_s: presentation time from the first frame of the video.
        duration_s: time for which it is shown; 0 if the file does not say.
        picture: PyAV's frame.
    """

    time_s: float
    duration_s: float
    picture: Any


def require_pyav() -> ModuleType:
    """Return the module `av`. Raises: MediaError: it cannot be imported."""
    try:
        import av
    except ImportError as error:
        raise MediaError(f"{needs('reading videos', 'av')} ({error})") from error
    return av


@contextmanager
def open_video(file: Path) -> Iterator[tuple[Any, Any]]:
    """Open a video. Yields: PyAV's container, and its video stream.

    Raises: MediaError: no PyAV, no video, or frames with more pixels than the limit. OSError: no regular file.
    """
    av = require_pyav()
    check_regular(file)
    # With the prefix and the list, names such as "http:a.mp4" and playlists inside of a file cannot open anything else.
    url, options = f"file:{file}", {"protocol_whitelist": "file", **_LIMITED}
    # With the list of formats, a file that is a playlist, a list for `concat` or a set of numbered images whatever its
    # name is not opened: it names other files.
    options["format_whitelist"] = _FORMATS
    with av.open(url, options=options, metadata_errors="replace") as container:
        cover = av.stream.Disposition.attached_pic
        streams = [stream for stream in container.streams.video if not stream.disposition & cover]
        if not streams:
            kinds = sorted({stream.type for stream in container.streams})
            raise MediaError(f"has no video stream, only {', '.join(kinds) or 'an empty container'}")
        _check_pixels(streams[0])
        streams[0].codec_context.options = _LIMITED  # the size can also change later
        streams[0].thread_type = "AUTO"
        yield container, streams[0]


def _check_pixels(stream: Any) -> None:
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height * max(1.0, pixel_aspect(stream)) > FRAME_PIXELS:
        raise MediaError(
            f"has frames of {width}x{height} pixels, but at most {FRAME_PIXELS} pixels are read: scale the video down"
        )


def decode_from(file: Path, container: Any, stream: Any, start_s: float) -> Generator[Frame, None, None]:
    """Decode frames in the order of presentation, from the last key frame at or before `start_s`.

    Args: container, stream: the file, just opened.
    Raises: MediaError: damage that the decoder notices; also the exceptions of PyAV.
    """
    frames = _timed(container, stream)
    first = next(frames, None)
    if first is None:
        raise MediaError("no frame could be decoded")
    if start_s <= 0 or container.format.name in _NOT_SEEKABLE:
        yield from _checked(chain([first], frames), first.time_s)
        return
    for back_s in _SEEK_BACK_S:  # some containers jump to a key frame behind the wanted time
        if start_s <= back_s:
            break
        offset = int((start_s - back_s + first.time_s) / stream.time_base)
        container.seek(offset, stream=stream, backward=True)
        landed = _timed(container, stream)
        head = next(landed, None)
        if head is not None and head.time_s - first.time_s <= start_s + CLOCK_S:
            yield from _checked(chain([head], landed), first.time_s)
            return
    with open_video(file) as (reopened, its_stream):
        yield from _checked(_timed(reopened, its_stream), first.time_s)


def _timed(container: Any, stream: Any) -> Iterator[Frame]:
    """Decode from the current position. `time_s` is not yet relative to the first frame."""
    unit = float(stream.time_base)
    if container.format.name == "avi":  # packets have decoding times only: in order, these are the times of the frames
        times: deque[int] = deque()
        for packet in container.demux(stream):
            if packet.size and packet.dts is not None:
                times.append(packet.dts)
            for picture in packet.decode():
                yield Frame((times.popleft() if times else picture.pts) * unit, unit, picture)
        return
    for picture in container.decode(stream):
        if picture.pts is None:
            raise MediaError("a frame has no time: copy the file to another container (ffmpeg -i … -c copy new.mp4)")
        yield Frame(picture.pts * unit, (picture.duration or 0) * unit, picture)


def _checked(frames: Iterator[Frame], origin: float) -> Iterator[Frame]:
    """Make times relative to the first frame. Raises: MediaError: a damaged frame, or another size within a video."""
    size = None
    for frame in frames:
        time_s, picture = frame.time_s - origin, frame.picture
        if picture.is_corrupt:
            raise MediaError(f"the frame at {time_s:.3f} s is damaged")
        size = size or (picture.width, picture.height)
        if (picture.width, picture.height) != size:
            raise MediaError(f"the size changes from {size} to {(picture.width, picture.height)} at {time_s:.3f} s")
        yield Frame(time_s, frame.duration_s, picture)


def to_rgb(picture: Any, pixel_aspect: float) -> NDArray[np.uint8]:
    """Convert a frame to upright RGB with square pixels.

    YUV is converted with the frame's matrix and range. If the file does not name the matrix: BT.709 for high
    definition (at least 1280 wide or more than 576 high), otherwise BT.601. Alpha is composited on white.

    Args:
        picture: PyAV's frame.
        pixel_aspect: width of a pixel divided by its height.
    Returns: [h, w, 3]. Raises: MediaError: HDR.
    """
    transfer = int(picture.color_trc)
    if transfer in _HDR:
        raise MediaError(f"is HDR ({_HDR[transfer]}): convert it to SDR first, with a tone mapping of your choice")
    if picture.colorspace == _UNSPECIFIED:
        high_definition = picture.width >= 1280 or picture.height > 576
        picture.colorspace = _BT709 if high_definition else _BT601
    alpha = any(component.is_alpha for component in picture.format.components)
    pixels = picture.to_ndarray(
        format="rgba" if alpha else "rgb24",
        width=max(1, round(picture.width * pixel_aspect)),
        height=picture.height,
        interpolation=_SWSCALE,
    )
    if alpha:
        opacity = pixels[..., 3:].astype(np.uint16)
        pixels = ((pixels[..., :3] * opacity + 255 * (255 - opacity) + 127) // 255).astype(np.uint8)
    return _upright(pixels, picture)


def _upright(pixels: NDArray[np.uint8], picture: Any) -> NDArray[np.uint8]:
    """Apply the display matrix: rotations by multiples of 90 degrees, and mirroring."""
    data = picture.side_data.get("DISPLAYMATRIX")
    if data is None:
        return pixels
    a, b, _, c, d = np.frombuffer(bytes(data), np.int32)[:5].tolist()  # (x, y) is shown at (a x + c y, b x + d y)
    if abs(a) + abs(d) >= abs(b) + abs(c):
        flip_y, flip_x = d < 0, a < 0
    else:
        pixels = pixels.swapaxes(0, 1)
        flip_y, flip_x = b < 0, c < 0
    return pixels[:: -1 if flip_y else 1, :: -1 if flip_x else 1]


def pixel_aspect(stream: Any) -> float:
    """Return the width of a pixel divided by its height; 1 within 1 %. Raises: MediaError: it is absurd."""
    aspect = float(stream.sample_aspect_ratio or 1)
    if not 0.25 <= aspect <= 4:
        raise MediaError(f"has pixels of the aspect ratio {aspect:g}: its header is damaged")
    return 1.0 if abs(aspect - 1) < 0.01 else aspect


@dataclass(frozen=True)
class Span:
    """Wanted times of a clip's frames, in seconds from the first frame of the video.

    Args:
        start_s: time of the first frame.
        end_s: frames from this time on are not used; None: all are.
        fps: frames per second; None: consecutive frames as stored.
    """

    start_s: float
    end_s: float | None
    fps: float | None

    def ends_before(self, frame: Frame) -> bool:
        """Return True if a frame begins at or after the end."""
        return self.end_s is not None and frame.time_s >= self.end_s - CLOCK_S


def choose_frames(frames: Iterator[Frame], span: Span, *, frame_s: float) -> Iterator[Frame]:
    """Yield the frames of a clip; a frame may repeat. Ends with the video or the span.

    Args:
        frames: in the order of presentation, from a time at or before the start.
        frame_s: duration of frames that have none in the file.
    """
    if span.fps is None:
        return _consecutive(frames, span, frame_s)
    return _nearest(frames, span, span.fps, frame_s)


def _consecutive(frames: Iterator[Frame], span: Span, frame_s: float) -> Iterator[Frame]:
    """Yield the frame nearest to the start, and all frames after it."""
    before: Frame | None = None
    for frame in frames:
        if span.ends_before(frame):
            break
        if frame.time_s < span.start_s:
            before = frame
            continue
        if before is not None and _is_nearest(before, frame, span.start_s):
            yield before
        before = None
        yield frame
    if before is not None and span.start_s < before.time_s + (before.duration_s or frame_s) - CLOCK_S:
        yield before  # no frame begins later, and this one is still shown


def _nearest(frames: Iterator[Frame], span: Span, fps: float, frame_s: float) -> Iterator[Frame]:
    """Yield the frame nearest to `start_s + i / fps` for each i."""
    before: Frame | None = None
    shown_until_s = 0.0
    i = 0
    for frame in frames:
        if span.ends_before(frame):
            shown_until_s = span.end_s or 0.0
            break
        while (wanted_s := span.start_s + i / fps) <= frame.time_s:
            yield before if before is not None and _is_nearest(before, frame, wanted_s) else frame
            i += 1
        before, shown_until_s = frame, frame.time_s + (frame.duration_s or frame_s)
    if span.end_s is not None:
        shown_until_s = min(shown_until_s, span.end_s)
    while before is not None and span.start_s + i / fps < shown_until_s - CLOCK_S:
        yield before
        i += 1


def _is_nearest(before: Frame, after: Frame, time_s: float) -> bool:
    """Return True if `before` is nearest, or both are equally near within the precision of times."""
    tie_s = min(CLOCK_S, (after.time_s - before.time_s) / 4)
    return time_s - before.time_s <= after.time_s - time_s + tie_s
