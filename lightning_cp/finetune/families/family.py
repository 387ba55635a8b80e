"""Define the interface of a model family: how its pipelines encode data, and what its transformer takes and returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from lightning_cp.comm.background import numbers_on
from lightning_cp.errors import FamilyError
from lightning_cp.finetune.families.latents import Latents, decode_latents, latent_moments
from lightning_cp.finetune.families.schedule import ObjectiveDefaults, ResolutionShift

Sample = dict[str, Tensor]  # what is stored for one sample: tensors by name, without a batch dim
Facts = dict[str, Any]  # plain numbers, strings and lists, read from a pipeline's configs; can be written as JSON
Media = Mapping[str, Tensor]


class Stored(Protocol):
    """A batch of stored samples: tensors with a batch dim, by name. `StoredBatch`, or a dict."""

    def __getitem__(self, name: str, /) -> Tensor:
        """Return a tensor."""
        ...

    def get(self, name: str, /) -> Tensor | None:
        """Return a tensor; None if the batch has none of this name."""
        ...


@dataclass(frozen=True)
class SideModel:
    """A model that runs before the transformer and steers it, such as a ControlNet. Only the side model is trained.

    Args:
        component: its name in the pipeline.
        outputs: names of the transformer's arguments that take its outputs, in order.
    """

    component: str
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Components:
    """Names of the pipeline's components that each phase needs. Parts of a pipeline may be missing (None).

    Args:
        text, media: components that encode.
        train: the transformers.
        after_encode_prompt: those of `text` that the pipeline calls itself, with what `encode_prompt` has returned.
        side: the model that is trained while the transformer is frozen.
        optional: those of `text` and `media` without which the pipeline encodes, too.
    """

    text: tuple[str, ...]
    media: tuple[str, ...] = ("vae",)
    train: tuple[str, ...] = ("transformer",)
    after_encode_prompt: tuple[str, ...] = ()
    side: SideModel | None = None
    optional: tuple[str, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the transformers and the side model: all models with trained or frozen weights in training."""
        return self.train if self.side is None else (*self.train, self.side.component)


@dataclass(frozen=True)
class Grid:
    """Sizes that a family accepts, and its tokens.

    Args:
        pixels: height and width must be multiples of it.
        frame_step: k, if the number of frames must be k·n + `least_frames`; 0 for images, which have one frame.
        patch: (frames, height, width) of the latents in one token.
        frames_first: True if latents are [frames, channels, height, width], False for channels first.
        least_frames: fewest frames. With 1, the family trains on pictures, too.
    """

    pixels: int
    frame_step: int
    patch: tuple[int, int, int]
    frames_first: bool = False
    least_frames: int = 1

    @classmethod
    def of_clips(cls, facts: Facts) -> Grid:
        """Build the grid of clips from the facts `spatial` and `temporal`, of the VAE, and `patch`."""
        patch = tuple(facts["patch"])
        return cls(pixels=facts["spatial"] * patch[1], frame_step=facts["temporal"], patch=patch)

    def check(self, *, height: int, width: int, frames: int = 1) -> None:
        """Raise FamilyError if media of this size cannot be encoded without cropping; it names the nearest sizes."""
        step, least = self.frame_step, self.least_frames
        for name, value in (("height", height), ("width", width)):
            _check_on_grid(name, value, self.pixels, self.pixels, f"a multiple of {self.pixels}")
        if step:
            _check_on_grid("frames", frames, step, least, f"{step}·n + {least}")
        elif frames != 1:
            raise FamilyError(f"frames={frames} must be 1: this family trains on images")

    def frames_up_to(self, most: int) -> int:
        """Return the largest number of frames of a clip that is on the grid and at most `most`; 1 for images."""
        step, least = self.frame_step, self.least_frames
        return max(most - least, 0) // step * step + least if step else 1

    def tokens(self, latents: Sequence[int]) -> int:
        """Return the number of tokens of one sample.

        Args: latents: shape [c, h, w] or [c, f, h, w] (frames and channels exchanged with `frames_first`).
        """
        *_, height, width = latents
        frames = 1 if len(latents) == 3 else latents[0 if self.frames_first else 1]
        f, h, w = self.patch
        return -(-frames // f) * (height // h) * (width // w)


@dataclass(frozen=True)
class TextStorage:
    """Rules for storing and batching text.

    Args:
        form: `padded`: all positions as the encoder returns them. `zeros`: cut at the true length, and filled with
            zeros up to `length` in a batch. `masked`: cut at the true length, filled up to the longest text of the
            batch, and masked.
        length: number of positions with padding.
        sequences: names of the stored tensors with a position dim, [length, ...].
        others: names of the other stored tensors of the text: pooled embeddings [dim], or a mask, if the
            padding of `padded` text is not at its end.
        mask: name of the mask that `masked` text gets in a batch, bool [b, length]; a batch without padding has none.
        sees_media: True if the text encoder also sees the sample's media. A text then belongs to one sample, and
            captions cannot be dropped, because the text of the empty caption would depend on the sample.
        more: texts of other encoders, with their own form, length and mask.
    """

    form: Literal["padded", "zeros", "masked"]
    length: int
    sequences: tuple[str, ...] = ("prompt_embeds",)
    others: tuple[str, ...] = ()
    mask: str = "prompt_mask"
    sees_media: bool = False
    more: tuple[TextStorage, ...] = ()

    @property
    def parts(self) -> tuple[TextStorage, ...]:
        """The rules for each encoder's text."""
        return (self, *self.more)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all stored tensors that depend on the text."""
        return tuple(name for part in self.parts for name in (*part.sequences, *part.others))


@dataclass(frozen=True)
class InputOptions:
    """Options of `Family.inputs`.

    Args:
        dtype: dtype of the activations that enter the transformer.
        guidance: value of the guidance embedding; ignored by transformers without one.
    """

    dtype: torch.dtype = torch.float32
    guidance: float = 1.0


class Family(ABC):
    """Properties of a model family: encodings, the transformer's arguments, and its output. No random numbers.

    An object is bound to one pipeline's configs by `facts`, which can be written to a file: training then needs
    neither the VAE nor the text encoders. `stored` below is a batch, see `StoredBatch`. `encode_text` and
    `encode_media` of every subclass run without gradients.

    Attributes:
        name: name under which `load_family` finds the class.
        pipelines: class names of the diffusers pipelines.
        components: components that each phase needs.
        takes_video: True if the VAE takes pixels with a frame dim, also for pictures.
        widths: keys of the transformer's config with the number of input channels (or of output channels, if conditions
            are joined to the input) and the widths of text and sound; empty: they are not checked.
        packed: number of latents in a token: input channels = latent channels × packed.
        packs_sound: True if a token of sound has all of its channels, False for one channel.
        lora_targets: default `target_modules` of a LoRA; empty: the transformer takes no adapters.
        outputs: how many of the transformer's outputs `prediction` takes: 1: the first itself; more: a tuple of them.
        entries, time_entry: names of the transformer's arguments that hold the noisy latents, and the time.
        condition_entries: names of arguments with conditions, which may be rounded like the noisy latents in bfloat16.
        default_frames: frames of a clip, if the pipeline's call has no default.
        least_sampled: fewest frames of a clip that the pipeline samples.
        optional_reference: True if the pipeline samples with and without references: the data have one for each
            sample, or none.
        counts_end: True if the pipeline's number of steps counts the end, at which it does not call the transformer.
        one_per_call: True if samples of a batch share positions or times in the transformer: the objective calls it
            once for each sample.
        one_prompt: True if the pipeline's call takes one text, not a list.
        trained: prefixes of the names of the transformer's weights that are trained, the others are frozen; empty: all.
        reference_clips: True if references are clips, as long as the samples; False: pictures.
        takes_image_noise: True if `encode_media` takes a condition with noise as "first_frame" [b, 3, 1, h, w].
        picture: name of the argument of the pipeline's call with a condition's picture.
    """

    name: ClassVar[str]
    pipelines: ClassVar[tuple[str, ...]]
    components: ClassVar[Components]
    takes_video: ClassVar[bool] = False
    widths: ClassVar[tuple[str, ...]] = ()
    packed: ClassVar[int] = 1
    packs_sound: ClassVar[bool] = True
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    outputs: ClassVar[int] = 1
    entries: ClassVar[tuple[str, ...]] = ("hidden_states",)
    time_entry: ClassVar[str] = "timestep"
    condition_entries: ClassVar[tuple[str, ...]] = ()
    default_frames: ClassVar[int] = 1
    least_sampled: ClassVar[int] = 1
    optional_reference: ClassVar[bool] = False
    counts_end: ClassVar[bool] = False
    one_per_call: ClassVar[bool] = False
    one_prompt: ClassVar[bool] = False
    trained: ClassVar[tuple[str, ...]] = ()
    reference_clips: ClassVar[bool] = False
    picture: ClassVar[str] = "image"
    takes_image_noise: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # stored tensors must not keep the encoders' graphs
        for name in ("encode_text", "encode_negative", "encode_media"):
            if name in cls.__dict__:
                setattr(cls, name, torch.no_grad()(cls.__dict__[name]))

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    @classmethod
    @abstractmethod
    def read_facts(cls, pipe: Any) -> Facts:
        """Read everything from a pipeline's configs that training needs."""

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """Sizes that the family accepts."""

    @property
    @abstractmethod
    def objective(self) -> ObjectiveDefaults:
        """Training objective of the pretrained weights."""

    @property
    @abstractmethod
    def text(self) -> TextStorage:
        """Return the rules for storing and batching text."""

    @abstractmethod
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        """Encode captions with the pipeline's text encoders. Returns: one stored sample per caption.

        Args: media: pictures that belong to the text, if the text encoder sees them.
        """

    def encode_negative(self, pipe: Any, prompts: Sequence[str], media: Media | None = None) -> list[Sample]:
        """Encode negative prompts as the pipeline does in sampling. Default: like captions."""
        return self.encode_text(pipe, prompts, media)

    def encode_media(self, pipe: Any, media: Media) -> list[Sample]:
        """Encode pictures or clips with the pipeline's VAE. Returns: one stored sample per picture or clip.

        A sample has "latents", not normalised, and "latents_std" if the objective draws from the VAE's distribution.

        Args: media: "pixels" [b, 3, f, h, w] in [-1, 1], f = 1 for pictures. Also conditions of this family.
        Raises: FamilyError: the model does not take this size, see `check_size`.
        """
        pixels = media["pixels"]
        self.check_size(height=pixels.shape[-2], width=pixels.shape[-1], frames=pixels.shape[2])
        mean, std = latent_moments(pipe.vae, pixels if self.takes_video else pixels[:, :, 0])
        if self.objective.posterior == "mode":
            return [{"latents": x} for x in mean]
        return [{"latents": x, "latents_std": y} for x, y in zip(mean, std, strict=True)]

    @abstractmethod
    def clean(self, stored: Stored, noise: Any = None) -> Any:
        """Return the normalised clean latents x0, float32 with a batch dim: `Latents`.

        With a dict, the first latents decide the number of tokens and the time. Each has its own noise and its own
        loss, and the losses are added.

        Args: noise: standard normal, like x0, to sample from the VAE's distribution; None: its mode.
        """

    def latent_times(self, times: Tensor) -> Latents:
        """Return the times of all latents of a sample: one for all of them, [b], or a dict with a time for each.

        Override it if the pipeline has several schedulers, which run at the same time. Default: one for all.

        Args: times: time of the main latents, [b].
        """
        return times

    @abstractmethod
    def inputs(self, noisy: Any, times: Any, stored: Stored, options: InputOptions) -> dict[str, Any]:
        """Build the transformer's keyword arguments, whole on every rank (with `return_dict=False`).

        With a side model, the arguments of its call are a dict under its component's name.

        Args:
            noisy: noisy latents in x0's layout.
            times: result of `latent_times`: [b], float sigma in [0, 1] for `flow`, otherwise int64; or a dict of them.
        """

    def prediction(self, output: Any, noisy: Any) -> Any:
        """Convert the transformer's output to x0's layout and the sign of `ObjectiveDefaults.prediction`: `Latents`.

        Args: output: the first output (a tensor, or a list), or a tuple of the first `outputs`.
        """
        return output

    def check_size(self, *, height: int, width: int, frames: int = 1) -> None:
        """Raise FamilyError if the model cannot train on media of this size (pixels, frames). Default: check `grid`."""
        self.grid.check(height=height, width=width, frames=frames)

    def default_sides(self, pipe: Any) -> Mapping[str, int]:
        """Return the default "height" and "width" of the pipeline, if its call and configs do not state them."""
        return {}

    def reference_size(self, *, height: int, width: int) -> tuple[int, int]:
        """Return height and width that references of samples of this size are loaded with. Default: the same."""
        return height, width

    def given_mask(self, stored: Stored, clean: Any) -> Latents | None:
        """Return which latents are given, not generated: bool, broadcastable to x0; None if there are none.

        Given latents enter the transformer clean, and have no loss. A dict may leave names out.
        """
        return None

    def call_arguments(self, media: Media) -> dict[str, Any]:
        """Return the pipeline's call arguments that pass the conditions in `media` (a first frame, a reference)."""
        return {}

    def sigma_range(self, component: str) -> tuple[float, float]:
        """Return (lowest, highest) sigma at which the pipeline uses a transformer. Default: all.

        Args: component: name of the transformer in the pipeline.
        """
        return 0.0, 1.0

    def shift_for(self, latents: Sequence[int]) -> float | ResolutionShift:
        """Return the shift of flow times. Args: latents: shape of one sample's x0."""
        return self.objective.shift

    @property
    def sound_rate(self) -> int | None:
        """Samples per second of "sound" [b, 2, samples] that `encode_media` takes; None: the model has no sound."""
        return None

    def pipeline_times(self, pipe: Any, step: int) -> Latents:
        """Return the times of a step of the pipeline's last call, in the form that `inputs` takes, without a batch dim.

        It is for proofs. Default: those of its scheduler.
        """
        time: Tensor = pipe.scheduler.timesteps[step]
        if self.objective.prediction != "flow":
            return time.long()
        sigma: Tensor = time.double() / pipe.scheduler.config.num_train_timesteps
        return sigma

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """Decode stored "latents", [b, ...], as pixels in [0, 1], float32."""
        return decode_latents(vae, latents)

    def decoded(self, pipe: Any, stored: Stored) -> dict[str, Tensor]:
        """Decode stored latents as the pipeline does: pixels in [0, 1] as "", and other fields of its result by name.

        It is for proofs. Default: the pixels, decoded by the VAE.
        """
        return {"": self.decode(pipe.vae, stored["latents"])}


def _check_on_grid(name: str, value: object, step: int, least: int, rule: str) -> None:
    """Raise FamilyError unless a value is least + n·step."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise FamilyError(f"{name}={value!r} must be a whole number, {rule}")
    below = least + (value - least) // step * step
    if value < least or value != below:
        near = [n for n in (below, below + step) if n >= least] or [least]
        raise FamilyError(f"{name}={value} must be {rule}: the nearest are {' and '.join(map(str, near))}")


def stored_latents(stored: Stored, noise: Tensor | None) -> Tensor:
    """Return the stored latents in float32, or a draw from their distribution. Args: noise: like "latents", or None."""
    latents = stored["latents"].float()
    return latents if noise is None else latents + stored["latents_std"].float() * noise


def per_channel(values: Sequence[float], like: Tensor, *, dim: int = 1) -> Tensor:
    """Return float32 values of the channels, shaped to broadcast along `dim` of `like`."""
    shape = [1] * like.dim()
    shape[dim] = len(values)
    return numbers_on(like.device, values, torch.float32).view(shape)
