"""Search the longest clip of Wan that can be trained at a fixed memory per rank, for each number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_cp.planning.devices import GB
from lightning_cp.planning.models import MediaSize
from lightning_cp.planning.step import Layout, Step
from lightning_cp.recipes.benchmarks.long_clips.activations import run_wan

HEIGHT, WIDTH, FPS, TEXT = 720, 1280, 16, 512
TOKENS = (HEIGHT // 16) * (WIDTH // 16)  # of a latent frame
# More positions than the published 1,024 latent frames, which do not change the other tensors.
WAN_14B = {"rope_max_seq_len": 16384}


@dataclass(frozen=True)
class Training:
    """The weights that are trained.

    Attributes:
        lora_rank: rank of the LoRA; None: all weights are trained.
        sharded: True: weights are sharded over the ranks.
    """

    lora_rank: int | None
    sharded: bool


TRAININGS = {
    "LoRA, weights replicated": Training(16, False),
    "LoRA, weights sharded": Training(16, True),
    "full, weights sharded": Training(None, True),
}


@dataclass(frozen=True)
class ClipRow:
    """The longest clip.

    Attributes:
        latent_frames: its frames in latents; 0: no clip fits.
        peak: bytes at the peak of its step, by category.
        peak_part: part of the step with the peak.
        next_bytes: bytes at the peak of the next longer clip, which does not fit.
    """

    memory_gb: float
    training: str
    ranks: int
    latent_frames: int
    peak: dict[str, int]
    peak_part: str
    next_bytes: int

    @property
    def frames(self) -> int:
        """Frames of the clip: 1 plus a multiple of 4."""
        return frames_of(self.latent_frames)

    @property
    def seconds(self) -> float:
        """Length at 16 frames a second."""
        return self.frames / FPS

    @property
    def tokens(self) -> int:
        """Tokens of the clip, on all ranks."""
        return self.latent_frames * TOKENS

    @property
    def frames_per_gb(self) -> float:
        """Frames per rank and GB of activations of a rank: the same for all numbers of ranks if the curve is linear."""
        return self.frames / self.ranks / (self.peak["activations"] + self.peak["buffers"]) * GB

    @property
    def frame_bytes(self) -> float:
        """Bytes on all ranks together that one more frame needs: the same for all numbers of ranks if it is linear."""
        return (self.next_bytes - sum(self.peak.values())) / 4 * self.ranks

    @property
    def largest(self) -> str:
        """The largest category at the peak."""
        return max(self.peak, key=lambda name: self.peak[name])


def frames_of(latent_frames: int) -> int:
    """Return the frames of a clip."""
    return max(4 * latent_frames - 3, 0)


def layout_of(ranks: int, *, sharded: bool) -> Layout:
    """Return the layout: Ulysses in a node of up to 8 ranks, a ring between nodes."""
    ulysses = min(ranks, 8)
    return Layout(
        ring=ranks // ulysses,
        ulysses=ulysses,
        rotate_method="alltoall",
        sharded=sharded and ranks > 1,
        checkpointing="full",
    )


def longest(bytes_of: Callable[[int], int], available: float, first: Sequence[int]) -> int:
    """Return the largest n for which `bytes_of(n)` is available; 0 if there is none.

    `bytes_of` grows with n and is affine wherever the peak stays in one part of the step. So a line through two known
    values gives the next n to look at. The search ends only when n was seen to fit, and n + 1 was seen not to.

    Args: first: two or more n to begin with.
    """
    known = {n: bytes_of(n) for n in first}
    while True:
        fits = max((n for n, size in known.items() if size <= available), default=0)
        over = min((n for n, size in known.items() if size > available), default=None)
        if over == fits + 1:
            return fits
        low, high = (fits, over) if fits and over is not None else (min(known), max(known))
        slope = (known[high] - known[low]) / (high - low)
        guess = low + int((available - known[low]) // slope)
        guess = max(guess, fits + 1) if over is None else min(max(guess, fits + 1), over - 1)
        known[guess] = bytes_of(guess)


def clip_rows(
    memories_gb: Sequence[float], reserved_gb: float, trainings: Sequence[str], ranks: Sequence[int]
) -> Iterator[ClipRow]:
    """Yield the longest clips of Wan 14B. Args: memories_gb, reserved_gb: of a rank; see `Request`."""
    for name in trainings:
        for n in ranks:
            yield from _rows_of(name, n, memories_gb, reserved_gb)


def _rows_of(name: str, ranks: int, memories_gb: Sequence[float], reserved_gb: float) -> Iterator[ClipRow]:
    training = TRAININGS[name]
    layout = layout_of(ranks, sharded=training.sharded)
    steps: dict[int, Step] = {}

    def step(latent_frames: int) -> Step:
        if latent_frames not in steps:
            size = MediaSize(HEIGHT, WIDTH, frames_of(latent_frames), TEXT)
            steps[latent_frames] = run_wan(WAN_14B, size, layout, lora_rank=training.lora_rank)
        return steps[latent_frames]

    for memory_gb in memories_gb:
        available = (memory_gb - reserved_gb) * GB
        count = longest(lambda n: step(n).peak_bytes, available, [*steps] or (8 * ranks, 16 * ranks))
        best, more = step(max(count, 1)), step(count + 1)
        yield ClipRow(memory_gb, name, ranks, count, best.peak, best.at, more.peak_bytes)
