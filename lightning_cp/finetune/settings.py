"""Settings of fine-tuning, each with its rule: frozen, and checked when created. Imports neither torch nor diffusers.

The recipes read the rules of these settings too, and check them before anything slow is imported.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from typing_extensions import override

from lightning_cp.rules import Each, Either, Integer, Number, OneOf, Rule, Text, check_rules, ruled

Sizes = tuple[tuple[int, int], ...]
"""Pairs (height, width) to choose a crop from."""
Use = Literal["train", "prior", "validation"]
TABLE_SUFFIXES = (".csv", ".jsonl")
ARCHIVES = (".tar", ".parquet")
CAPTION = "{}"  # place of the caption in a template
REPEATS = 10_000
"""Most repeats of one row: an epoch has an index of all its items in memory."""
_NULL = OneOf((None,))
_SIZES = Either(_NULL, Each(Each(Integer(1), 2)))
_DTYPES = ("bfloat16", "float16", "float32")
_FLAG = OneOf((True, False))


@dataclass(frozen=True)
class _Targets(Rule):
    @override
    def passes(self, value: Any) -> bool:
        if value is None or isinstance(value, str):
            return True
        return isinstance(value, Sequence) and len(value) > 0 and all(map(Text().passes, value))

    @override
    def describe(self) -> str:
        return "a list of names such as [to_q,to_v], or a regular expression"


@dataclass(frozen=True)
class _Ranks(Rule):
    @override
    def passes(self, value: Any) -> bool:
        return value is None or (
            isinstance(value, Mapping) and len(value) > 0 and all(map(Integer(1).passes, value.values()))
        )

    @override
    def describe(self) -> str:
        return "null, or whole numbers of at least 1 by the ends of layers' names, such as {to_q: 8}"


@dataclass(frozen=True)
class LoraSettings:
    """Settings of a LoRA.

    Args:
        rank: rank of the matrices; None: that of `file`, or 16.
        alpha: the adapter's output is scaled by alpha / rank; None: `rank`, or that of `file`.
        targets: layers to adapt: ends of their names, or a regular expression that matches whole names; None: the
            family's, or those of `file`; "all-linear": every linear layer. In a list, "default" means the family's and
            "text" the layers of the text stream of a model with joint attention.
        dropout: probability of dropping an element of an adapter's input, in [0, 1). On shards, each rank draws its
            own elements from the shared random state.
        file: LoRA in diffusers' format to continue, or a folder with one.
        ranks: ranks of layers by the ends of their names, in place of `rank`; the last one that matches counts. Without
            `alpha`, the scale of each layer is 1.
        dora: train the norms of the adapted layers' weights, too (DoRA, arXiv:2402.09353).
        lokr: train Kronecker products in place of a LoRA (LoKr, arXiv:2309.14859): the size of the first factor, if it
            divides that of the layer; -1 makes both factors about equally large. `rank` is that of the second factor.
    Raises: ValueError: an invalid value.
    """

    rank: int | None = ruled(None, Either(_NULL, Integer(1)))
    alpha: float | None = ruled(None, Either(_NULL, Number(above=0)))
    targets: Sequence[str] | str | None = ruled(None, _Targets())
    dropout: float = ruled(0.0, Number(minimum=0, below=1))
    file: str | Path | None = ruled(None, Either(_NULL, Text()))
    ranks: Mapping[str, int] | None = ruled(None, _Ranks())
    dora: bool = ruled(False, _FLAG)
    lokr: int | None = ruled(None, Either(OneOf((None, -1)), Integer(2)))

    def __post_init__(self) -> None:
        if isinstance(self.file, Path):
            object.__setattr__(self, "file", str(self.file))
        check_rules(self, "lora.")
        plain_only = {"lora.ranks": self.ranks, "lora.dora": self.dora, "lora.lokr": self.lokr}
        if self.file is not None and (name := next((name for name, value in plain_only.items() if value), None)):
            raise ValueError(f"{name} does not work with lora.file: only a plain LoRA of one rank is continued")
        if self.lokr is not None and (self.dora or self.dropout):
            name = "lora.dora" if self.dora else "lora.dropout"
            raise ValueError(f"{name} does not work with lora.lokr: leave one out")
        if isinstance(self.targets, str):
            try:
                re.compile(self.targets)
            except re.error as error:
                raise ValueError(f"lora.targets={self.targets} is not a valid regular expression: {error}") from None
        elif self.targets is not None:
            object.__setattr__(self, "targets", tuple(self.targets))


@dataclass(frozen=True)
class _MediaPath(Text):
    @override
    def passes(self, value: Any) -> bool:
        return super().passes(value) and (not value.lower().endswith(ARCHIVES) or os.path.isdir(value))

    @override
    def describe(self) -> str:
        return "a folder of media, or a .csv or .jsonl table; convert .tar and .parquet files with lightning-cp convert"


@dataclass(frozen=True)
class _Name(Rule):
    @override
    def passes(self, value: Any) -> bool:
        return value is None or (isinstance(value, str) and value.strip("/ ") == value)

    @override
    def describe(self) -> str:
        return "null or a text without slashes at its ends"


@dataclass(frozen=True)
class _Texts(Rule):
    @override
    def passes(self, value: Any) -> bool:
        texts = value.items() if isinstance(value, Mapping) else [(None, None)]
        return all(isinstance(new, str) and isinstance(old, str) and old != "" for old, new in texts)

    @override
    def describe(self) -> str:
        return "texts by the texts that they replace, such as {a man: ohwx man}"


@dataclass(frozen=True, kw_only=True)
class DataFolder:
    """A folder or table of media, with its own settings.

    Args:
        path: see `find_sources`.
        name: first part of its samples' names in the cache. None: no name for the first folder of a data set, and the
            name of the folder or table for the others. A folder with another name is encoded again.
        repeats: number of times that an epoch shows each sample, in addition to the repeats in a table.
        sizes: pairs (height, width) to crop to; None: those of the whole data set.
        weight: weight of its samples in the loss.
        use: `train`; `prior`: pictures of the class for prior preservation, which are trained on and never held out;
            `validation`: the validation set, which is not trained on.
        caption_column: column of a table with the captions, if it is not `caption`, `captions` or `text`.
        caption: template of the captions, with `{}` in place of the file's caption. Without `{}`, it is the caption of
            all files.
        replace: texts to replace in the files' captions, and the texts to put there.
    Raises: ValueError: an invalid value.
    """

    path: Path = ruled(MISSING, _MediaPath())
    name: str | None = ruled(None, _Name())
    repeats: int = ruled(1, Integer(1, REPEATS))
    sizes: Sizes | None = ruled(None, _SIZES)
    weight: float = ruled(1.0, Number(above=0))
    use: Use = ruled("train", OneOf(get_args(Use)))
    caption_column: str | None = ruled(None, Either(_NULL, Text()))
    caption: str = ruled(CAPTION, Text())
    replace: Mapping[str, str] = ruled(MISSING, _Texts(), default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", str(self.path))
        check_rules(self)
        object.__setattr__(self, "path", Path(self.path))
        if self.sizes is not None:
            object.__setattr__(self, "sizes", tuple((height, width) for height, width in self.sizes))

    def captioned(self, captions: Sequence[str]) -> tuple[str, ...]:
        """Return the captions to train with, for the captions of a file."""
        if CAPTION not in self.caption:
            return (self.caption,)
        for old, new in self.replace.items():
            captions = [caption.replace(old, new) for caption in captions]
        return tuple(self.caption.replace(CAPTION, caption).strip() for caption in captions)


@dataclass(frozen=True, kw_only=True)
class PrecomputeSettings:
    """Settings for encoding media.

    Args:
        captions: `required`: media without a caption are skipped; `optional`: they get the empty caption.
        sizes: pairs (height, width); None: see `buckets_of`.
        frames: frames per clip, or several numbers; None: the pipeline's default, and 1 for images.
        fps: frames per second of clips; None: the file's.
        clips: `first`: one clip from the beginning of each video; `all`: as many as it has, one after another.
        max_upscale: media that would be enlarged more are skipped.
        dtype: dtype of the text encoders, and of the stored text: its name, or torch's.
        vae_dtype: dtype of the VAE, and of the stored latents.
        text_batch: captions that are encoded together.
        tiling: encode in tiles, for media that are too large for the VAE at once. Seams can differ slightly.
        vae_ranks: number of ranks that encode one picture or clip together.
        workers: threads of each rank that read files.
        on_bad: treatment of a file that cannot be used: skip, error.
        image_noise: add noise to the first frames that CogVideoX image to video is conditioned on.
        sheet: number of samples on the contact sheet; 0: none.
    Raises: ValueError: an invalid value.
    """

    captions: str = ruled("required", OneOf(("required", "optional")))
    sizes: Sequence[Sequence[int]] | None = ruled(None, _SIZES)
    frames: int | Sequence[int] | None = ruled(None, Either(_NULL, Either(Integer(1), Each(Integer(1)))))
    fps: float | None = ruled(None, Either(_NULL, Number(above=0)))
    clips: str = ruled("first", OneOf(("first", "all")))
    max_upscale: float = ruled(1.5, Number(above=0))
    dtype: Any = ruled("bfloat16", OneOf(_DTYPES))
    vae_dtype: Any = ruled("float32", OneOf(_DTYPES))
    text_batch: int = ruled(8, Integer(1))
    tiling: bool = ruled(False, _FLAG)
    vae_ranks: int = ruled(1, Integer(1))
    workers: int = ruled(2, Integer(0))
    on_bad: str = ruled("skip", OneOf(("skip", "error")))
    image_noise: bool = ruled(False, _FLAG)
    sheet: int = ruled(16, Integer(0))

    def __post_init__(self) -> None:
        for name in ("dtype", "vae_dtype"):
            object.__setattr__(self, name, str(getattr(self, name)).removeprefix("torch."))
        check_rules(self)
        if self.clips == "all" and not isinstance(self.frames, int):
            raise ValueError("clips=all needs the length of a clip: set frames to one number")

    def plain(self) -> dict[str, Any]:
        """Return all settings as JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    def identity(self) -> dict[str, Any]:
        """Return the settings that samples depend on, in a form that is equal for settings with the same meaning."""
        names = ("fps", "clips", "tiling", "max_upscale", "image_noise")
        sizes, frames = self.sizes, self.frames
        return {
            "sizes": None if sizes is None else sorted({tuple(size) for size in sizes}),
            "frames": frames if frames is None else sorted({frames} if isinstance(frames, int) else set(frames)),
            "dtype": f"torch.{self.dtype}",
            "vae_dtype": f"torch.{self.vae_dtype}",
            **{name: getattr(self, name) for name in names},
        }


@dataclass(frozen=True)
class Interval(Each):
    """Two numbers that pass a rule, the first less than the second."""

    count: int = 2

    @override
    def passes(self, value: Any) -> bool:
        return super().passes(value) and bool(value[0] < value[1])

    @override
    def describe(self) -> str:
        return f"{super().describe()}, the first less than the second"


@dataclass(frozen=True)
class _Factor(Number):
    @override
    def passes(self, value: Any) -> bool:
        return hasattr(value, "is_clamped") or super().passes(value)  # a `ResolutionShift`, too


@dataclass(frozen=True)
class _Quantiles(Rule):
    @override
    def passes(self, value: Any) -> bool:
        return Each(Number(above=0, below=1)).passes(value) and len(set(value)) == len(value)

    @override
    def describe(self) -> str:
        return "a list of different numbers between 0 and 1"


QUANTILES = _Quantiles()  # of the timestep density, for validation


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """Settings that all objectives have, see `Objective`. Raises: ValueError: an invalid value."""

    seed: int
    cond_dropout: float = ruled(0.0, Number(minimum=0, maximum=1))
    guidance: float | None = ruled(None, Either(_NULL, Number(minimum=0)))
    sample_posterior: bool | None = ruled(None, OneOf((None, True, False)))
    weighting: str | None = ruled(None, OneOf((None, "min_snr", "cosmap", "sigma_sqrt")))
    min_snr_gamma: float = ruled(5.0, Number(above=0))
    huber_c: float | None = ruled(None, Either(_NULL, Number(above=0)))

    def __post_init__(self) -> None:
        check_rules(self)


@dataclass(frozen=True, kw_only=True)
class FlowSettings(ObjectiveSettings):
    """Settings of flow matching, see `FlowMatching`."""

    shift: Any = ruled(None, Either(_NULL, _Factor(above=0)))
    sigma_range: tuple[float, float] = ruled((0.0, 1.0), Interval(Number(minimum=0, maximum=1)))


@dataclass(frozen=True, kw_only=True)
class DiffusionSettings(ObjectiveSettings):
    """Settings of diffusion with integer times, see `Diffusion`."""

    weighting: str | None = ruled(None, OneOf((None, "min_snr")))
    time_range: tuple[int, int] | None = ruled(None, Either(_NULL, Interval(Integer(0))))


def check_ranges(ranges: Mapping[str, Sequence[float]]) -> None:
    """Check the sigma range of each expert, by name. Raises: ValueError: one is no interval, or two overlap."""
    rule = Interval(Number(minimum=0, maximum=1))
    before, end = "", 0.0
    for name, (low, high) in sorted(ranges.items(), key=lambda one: tuple(one[1])):
        if not rule.passes((low, high)):
            raise ValueError(f"the sigma range [{low:g}, {high:g}] of {name} must be {rule.describe()}")
        if low < end:
            raise ValueError(
                f"the sigma ranges of {before} and {name} overlap: {before} ends at {end:g}, and {name} begins at "
                f"{low:g}. One noise level can have one expert only"
            )
        before, end = name, high
