"""A tiny pipeline of diffusers for tests: how it is made, and what it is asked."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest.mock import patch

import diffusers
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tests.models import TINY as MODELS
from tests.pipelines.vaes import kl

WORDS, WORDS_2, WORDS_3 = "tokenizer text_encoder", "tokenizer_2 text_encoder_2", "tokenizer_3 text_encoder_3"


@dataclass(frozen=True)
class TinyPipe:
    """One pipeline with random weights, which are equal on all ranks after the same seed.

    Attributes:
        kind: name of its class in diffusers, or a function that makes it from its components.
        parts: functions that make the components, in this order; a name may be several, with spaces between them,
            and "-" is no component.
        call: the keyword arguments of a call, without `generator`; functions are called for their value, and `...`
            is no argument.
        guidance: computation of the guidance branches: "batch": in one call of the transformer, "calls": in
            several, "none": it has one branch.
        transformers: names of the transformers that run parallel.
        controlnets: names of the ControlNets that run parallel.
        output: name of the field of the result that is compared.
        prepare: changes the pipeline after it is made.
    """

    kind: str | Callable[..., Any]
    parts: Mapping[str, Callable[[], Any]]
    call: Mapping[str, Any] = field(repr=False)
    guidance: Literal["batch", "calls", "none"]
    transformers: tuple[str, ...] = ("transformer",)
    controlnets: tuple[str, ...] = ()
    output: str = "images"
    prepare: Callable[[Any], None] | None = None

    def but(
        self,
        kind: str = "",
        parts: Mapping[str, Any] | None = None,
        call: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> TinyPipe:
        """The same with changes."""
        parts, call = {**self.parts, **(parts or {})}, {**self.call, **(call or {})}
        return replace(self, kind=kind or self.kind, parts=parts, call=call, **others)

    def make(self) -> Any:
        """The pipeline."""
        made: dict[str, Any] = {}
        for names, make in self.parts.items():
            part = make()
            made |= dict(zip(names.split(), part, strict=True)) if " " in names else {names: part}
        made.pop("-", None)
        with quiet():
            pipe = (getattr(diffusers, self.kind) if isinstance(self.kind, str) else self.kind)(**made)
        if self.prepare is not None:
            self.prepare(pipe)
        return pipe

    def pipe(self, dtype: torch.dtype | None = None) -> Any:
        """The pipeline with equal weights each time, without a progress bar."""
        torch.manual_seed(0)
        pipe = self.make()
        pipe.set_progress_bar_config(disable=True)
        for part in pipe.components.values() if dtype is not None else ():
            if isinstance(part, nn.Module):
                part.to(dtype)
        return pipe

    def draw(self, pipe: Any, seed: int = 7, **changed: Any) -> Tensor:
        """What a call gives. Args: changed: arguments of the call."""
        torch.manual_seed(seed)  # some draw without the generator
        inputs = {**self.inputs(), **changed}
        value = getattr(pipe(**inputs, generator=torch.Generator().manual_seed(seed)), self.output)
        return torch.as_tensor(value if isinstance(value, Tensor) else value[-1])

    def inputs(self) -> dict[str, Any]:
        """The keyword arguments of a call."""
        given = {name: x for name, x in self.call.items() if x is not ...}
        return {name: x() if callable(x) else copy.deepcopy(x) for name, x in given.items()}


def error_of(expected: Tensor, found: Tensor) -> float:
    """The largest relative error."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of diffusers about its own imports, and of NumPy about tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def no_zeros(module: nn.Module, scale: float = 0.05) -> nn.Module:
    """Fills parameters that are all zero with noise, so that nothing that is computed is multiplied by nothing."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(std=scale)
    return module


def loud(module: nn.Module, gain: float = 2.0) -> nn.Module:
    """`no_zeros` in eval mode, with larger matrices: at their usual size the text hardly changes the latents."""
    no_zeros(module)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(gain)
    return module.eval()


def model(name: str, gain: float = 1.0, **config: Any) -> Callable[[], nn.Module]:
    """A function that makes a model of `tests/models` with changes of its configuration."""

    def make() -> nn.Module:
        with quiet(), patch("torch.empty", torch.zeros):  # some parameters keep what torch.empty found in memory
            made = MODELS[name].make(**config)
        if MODELS[name].prepare is not None:
            MODELS[name].prepare(made)
        return loud(made, gain)

    return make


def of(kind: str, **config: Any) -> Callable[[], Any]:
    """A function that makes an object of a class of diffusers."""

    def make() -> Any:
        with quiet():
            return getattr(diffusers, kind)(**config)

    return make


def flow_match(**config: Any) -> Callable[[], Any]:
    """A function that makes the scheduler of most pipelines."""
    return of("FlowMatchEulerDiscreteScheduler", **config)


@functools.cache
def _quiet(kind: type) -> type:
    """A class of schedulers that takes tensors of sigmas without NumPy's warning about them."""

    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        with quiet():
            kind.set_timesteps(self, *args, **kwargs)

    functools.update_wrapper(set_timesteps, kind.set_timesteps)
    return type(kind.__name__, (kind,), {"set_timesteps": set_timesteps})


def quiet_steps(kind: str, **config: Any) -> Callable[[], Any]:
    """A function that makes a scheduler of diffusers whose steps NumPy warns about."""
    return lambda: _quiet(getattr(diffusers, kind))(**config)


def parts_of(words: Any, transformer: Any, vae: Any = kl, scheduler: Any = None, **others: Any) -> dict[str, Any]:
    """The components that almost every pipeline has."""
    parts = {WORDS: words, "transformer": transformer, "vae": vae, "scheduler": scheduler or flow_match()}
    return {**parts, **others}


def unipc() -> Any:
    """The scheduler of Wan."""
    config = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return diffusers.UniPCMultistepScheduler(**config)


def image(height: int, width: int, seed: int = 1) -> Image.Image:
    """A picture of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def video(frames: int, height: int, width: int, seed: int = 1) -> list[Image.Image]:
    """A video of noise."""
    return [image(height, width, seed * 100 + frame) for frame in range(frames)]


def prompt_embeds(kept: int, negative: int, tokens: int) -> dict[str, Tensor]:
    """Arguments in place of a prompt and a negative prompt, for pipelines that read text only with `ftfy` installed.

    Args: kept, negative: tokens that are noise; those after them, up to `tokens`, are zeros.
    """
    made = {}
    for seed, (name, length) in enumerate((("prompt", kept), ("negative_prompt", negative)), 1):
        embeds = torch.randn(1, tokens, 16, generator=torch.Generator().manual_seed(seed))
        embeds[:, length:] = 0
        made[f"{name}_embeds"] = embeds
    return made
