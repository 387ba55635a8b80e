"""Run a pipeline, and record or replace the forward of its transformer."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.errors import FamilyError
from lightning_cp.finetune.families import Components, Family, Media
from lightning_cp.finetune.objectives.objective import first_outputs
from lightning_cp.undoable import Around, intercept_method, set_attribute, undo_all


@dataclass
class Recording:
    """Record of a pipeline call.

    Attributes:
        calls: keyword arguments of each call of a transformer, in order.
        outputs: what `Family.prediction` takes of the output of each call.
        noises: tensors that the pipeline drew with `randn_tensor`, in order.
        result: the pipeline's output.
    """

    calls: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    noises: list[Tensor] = field(default_factory=list)
    result: Any = None


def transformers_of(pipe: Any, components: Components) -> list[nn.Module]:
    """Return the pipeline's transformers; some pipelines have two, and one of them may be missing.

    Raises: FamilyError: all are missing.
    """
    found = [module for name in components.train if (module := getattr(pipe, name, None)) is not None]
    if not found:
        raise FamilyError(f"{type(pipe).__name__} has no transformer: load one of {', '.join(components.train)}")
    return found


@torch.no_grad()
def call(
    pipe: Any,
    family: Family,
    captions: Sequence[str],
    media: Media,
    *,
    answer: Callable[[dict[str, Any]], Any] | None = None,
    seed: int = 0,
    **settings: Any,
) -> Recording:
    """Call the pipeline and record what its transformers are given.

    Where the pipeline samples a condition from the VAE's distribution (CogVideoX), it gets the mode instead: families
    have no random numbers.

    Args:
        answer: called in place of the transformers with their keyword arguments; None: the transformers run.
        seed: seed of the generator of the pipeline's noise.
        settings: arguments of the call.
    """
    pixels = media["pixels"]
    parameters = inspect.signature(pipe.__call__).parameters  # some choose height and width by a picture
    named = zip(("num_frames", "height", "width"), pixels.shape[2:], strict=True)
    sizes: dict[str, Any] = {name: size for name, size in named if name in parameters}
    record = Recording()
    with _recorded(pipe, family, record, answer):
        record.result = pipe(
            prompt=list(captions),
            generator=torch.Generator("cpu").manual_seed(seed),
            **sizes,
            **family.call_arguments(media),
            **settings,
        )
    return record


def guidance_settings(pipe: Any, negative: Sequence[str]) -> dict[str, Any]:
    """Return call arguments that make the pipeline compute both branches of classifier-free guidance.

    "negative_prompt" is left out if the pipeline does not take it: its negative prompt is then empty. A pipeline
    without a scale has a guider, which decides.
    """
    parameters = inspect.signature(pipe.__call__).parameters
    settings: dict[str, Any] = {"negative_prompt": list(negative)} if "negative_prompt" in parameters else {}
    scales = [name for name in ("true_cfg_scale", "guidance_scale") if name in parameters][:1]
    return settings | dict.fromkeys(scales, 4.0)


@contextmanager
def _recorded(
    pipe: Any, family: Family, record: Recording, answer: Callable[[dict[str, Any]], Any] | None
) -> Iterator[None]:
    modules = transformers_of(pipe, family.components)
    drawing: Any = sys.modules[type(pipe).__module__]
    draw = getattr(drawing, "randn_tensor", None)
    posterior: Any = sys.modules["diffusers.models.autoencoders.vae"]

    def drawn(*args: Any, **kwargs: Any) -> Tensor:
        assert draw is not None, "only put in place of a function"
        noise: Tensor = draw(*args, **kwargs)
        record.noises.append(noise.clone())
        return noise

    around = (_recording(module, record, answer, family.outputs) for module in modules)
    undo = [intercept_method(module, "forward", each) for module, each in zip(modules, around, strict=True)]
    if draw is not None:
        undo.append(set_attribute(drawing, "randn_tensor", drawn))
    undo.append(set_attribute(posterior, "randn_tensor", _no_noise))
    try:
        yield
    finally:
        undo_all(undo)


def _no_noise(shape: Sequence[int], **kwargs: Any) -> Tensor:
    return torch.zeros(tuple(shape), device=kwargs.get("device"), dtype=kwargs.get("dtype"))


def _recording(
    module: nn.Module, record: Recording, answer: Callable[[dict[str, Any]], Any] | None, outputs: int
) -> Around:
    """Wrap a transformer's forward: record its arguments and output; with `answer`, do not run it."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]

    def around(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        record.calls.append(passed_arguments(given))
        if answer is None:
            output = forward(*args, **kwargs)
        else:
            answered = answer(record.calls[-1])
            output = (answered,) if outputs == 1 else answered
        record.outputs.append(first_outputs(output, outputs))
        return output

    return around


def passed_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Leave out arguments that have no effect: None and empty dicts, and the form of the output."""
    return {
        name: x
        for name, x in given.items()
        if name != "return_dict" and x is not None and not (isinstance(x, dict) and not x)
    }
