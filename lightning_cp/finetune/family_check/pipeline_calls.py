"""Run a pipeline, and record or replace the forward of its transformer."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor, nn

from lightning_cp.errors import FamilyError
from lightning_cp.finetune.families import Components, Family, Media, SideModel
from lightning_cp.finetune.modular import all_blocks, is_modular
from lightning_cp.finetune.objectives.objective import first_outputs
from lightning_cp.finetune.side import SteeredTransformer, steering_arguments
from lightning_cp.nest import replace
from lightning_cp.undoable import Around, intercept_method, set_attribute, undo_all


@dataclass
class Recording:
    """Record of a pipeline call.

    Attributes:
        calls: keyword arguments of each call of a transformer, in order. Those of the side model's last call are among
            them, with its name, such as "controlnet.hidden_states".
        outputs: what `Family.prediction` takes of the output of each call.
        steering: for each call, the outputs of the side model's last call, by the names of the transformer's arguments.
        noises: tensors that the pipeline drew with `randn_tensor`, in order.
        result: the pipeline's output.
    """

    calls: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    steering: list[dict[str, Any]] = field(default_factory=list)
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


def training_models(pipe: Any, family: Family) -> list[nn.Module]:
    """Return the modules that training calls with the arguments of `Family.inputs`: the transformers of a pipeline.

    A transformer with a side model is one `SteeredTransformer`.
    """
    models, rule = transformers_of(pipe, family.components), family.components.side
    if rule is None:
        return models
    return [SteeredTransformer(model, getattr(pipe, rule.component), rule) for model in models]


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
    lengths = zip(("num_frames", "height", "width"), pixels.shape[2:], strict=True)
    sizes: dict[str, Any] = {name: size for name, size in lengths if name in parameters}
    texts: dict[str, Any] = {"prompt": list(captions)}
    texts |= {name: list(x) for name, x in settings.items() if name == "negative_prompt"}
    if family.one_prompt:
        texts = {name: x[0] for name, x in texts.items()}
    if is_modular(pipe) and settings.get("output_type") == "latent":
        settings["output_type"] = "pt"  # their blocks decode always
    record = Recording()
    with _recorded(pipe, family, record, answer):
        record.result = pipe(
            generator=torch.Generator("cpu").manual_seed(seed),
            **sizes,
            **family.call_arguments(media),
            **{**settings, **texts},
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
    parts = [pipe, *(all_blocks(pipe.blocks) if is_modular(pipe) else ())]
    modules_of_parts = [sys.modules[name] for name in {type(x).__module__ for x in parts}]
    drawing = [module for module in modules_of_parts if hasattr(module, "randn_tensor")]
    posterior: Any = sys.modules["diffusers.models.autoencoders.vae"]

    def drawn(*args: Any, **kwargs: Any) -> Tensor:
        noise: Tensor = randn_tensor(*args, **kwargs)
        record.noises.append(noise.clone())
        return noise

    side: dict[str, dict[str, Any]] = {"arguments": {}, "outputs": {}}
    around = (_recording(module, record, answer, family.outputs, side) for module in modules)
    undo = [intercept_method(module, "forward", each) for module, each in zip(modules, around, strict=True)]
    if (rule := family.components.side) is not None:
        undo.append(intercept_method(getattr(pipe, rule.component), "forward", _recording_side(rule, side)))
    undo += [set_attribute(module, "randn_tensor", drawn) for module in drawing]
    undo.append(set_attribute(posterior, "randn_tensor", _no_noise))
    try:
        yield
    finally:
        undo_all(undo)


def _no_noise(shape: Sequence[int], **kwargs: Any) -> Tensor:
    return torch.zeros(tuple(shape), device=kwargs.get("device"), dtype=kwargs.get("dtype"))


def _recording_side(rule: SideModel, side: dict[str, dict[str, Any]]) -> Around:
    """Wrap a side model's forward: keep the named arguments and the outputs of its last call in `side`."""

    def around(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = forward(*args, **kwargs)
        side["arguments"] = with_prefix(rule, kwargs)
        side["outputs"] = steering_arguments(rule, output)
        return output

    return around


def _recording(
    module: nn.Module,
    record: Recording,
    answer: Callable[[dict[str, Any]], Any] | None,
    outputs: int,
    side: dict[str, dict[str, Any]],
) -> Around:
    """Wrap a transformer's forward: record its arguments and output; with `answer`, do not run it.

    Args: side: arguments and outputs of the side model's last call.
    """
    names = list(inspect.signature(type(module).forward).parameters)[1:]

    def around(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        arguments = passed_arguments({**given, **side["arguments"]})
        record.calls.append(replace(Tensor, Tensor.clone, arguments))  # some pipelines change their latents in place
        record.steering.append(side["outputs"])
        if answer is None:
            output = forward(*args, **kwargs)
        else:
            answered = answer(record.calls[-1])
            output = (answered,) if outputs == 1 else answered
        record.outputs.append(first_outputs(output, outputs))
        return output

    return around


def with_prefix(rule: SideModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the passed arguments of a side model, with its component before their names."""
    return {f"{rule.component}.{name}": x for name, x in passed_arguments(arguments).items()}


def passed_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Leave out arguments that have no effect: None and empty dicts, and the form of the output."""
    return {
        name: x
        for name, x in given.items()
        if name != "return_dict" and x is not None and not (isinstance(x, dict) and not x)
    }
