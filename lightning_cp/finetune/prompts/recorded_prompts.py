"""Encode prompts once, and pass the results to a pipeline later, after its text encoders were freed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from lightning_cp.nest import replace, tensors

_PIXELS: Any = (Image, Tensor, np.ndarray)
_TRAINED = ("transformer", "controlnet")
_MARGIN = 1.2  # memory that an encoder needs, as a multiple of its weights


class _EncodedError(Exception):
    """Raised at the first call of a trained model, to end a pipeline's call after the text was encoded."""


class RecordedPrompts:
    """Results of a pipeline's `encode_prompt`, on the CPU, by the arguments of the call.

    Args: then_called: components that the pipeline calls with these results (`Components.after_encode_prompt`). Their
        results are kept in place of those of `encode_prompt`, of which the first channel is kept to recognise them.
    """

    def __init__(self, then_called: Sequence[str] = ()) -> None:
        self._results: dict[str, Any] = {}
        self._then_called = tuple(then_called)

    @torch.no_grad()
    def record(self, pipe: Any, calls: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        """Call the pipeline with each call's arguments, up to the first call of a trained model, and keep the text.

        Args:
            pipe: pipeline with its text encoders and its VAE, on the CPU.
            device: device of this rank; they run there if its free memory allows, otherwise on the CPU.
        Raises: the exception of the pipeline, if it does not accept the arguments.
        """
        all_modules = {name: x for name, x in pipe.components.items() if isinstance(x, nn.Module)}
        transformers = [x for name, x in all_modules.items() if name.startswith(_TRAINED)]
        modules = [x for name, x in all_modules.items() if not name.startswith(_TRAINED)]  # the VAE encodes pictures
        at = device if _fits(modules, device) else torch.device("cpu")
        with ExitStack() as stack:
            for transformer in transformers:
                hook = transformer.register_forward_pre_hook(_stop, prepend=True)
                stack.callback(hook.remove)
            for module in modules:
                module.to(at)
                stack.callback(module.to, "cpu")
            pipe.encode_prompt = self._recording(pipe.encode_prompt, at)
            stack.callback(pipe.__dict__.pop, "encode_prompt")
            for name in self._then_called:
                module = getattr(pipe, name)
                module.forward = self._recording_module(name, module.forward)
                stack.callback(module.__dict__.pop, "forward")
            for call in calls:
                try:
                    pipe(**call, generator=torch.Generator().manual_seed(0), output_type="pt")
                except _EncodedError:
                    continue

    def replay_in(self, pipe: Any, device: torch.device) -> None:
        """Make a pipeline's `encode_prompt` return the kept results, on a device."""

        def kept(key: str) -> Any:
            if key not in self._results:
                raise ValueError(f"{type(pipe).__name__}: a prompt was not encoded before its text encoders were freed")
            return replace(Tensor, lambda x: x.to(device), self._results[key])

        pipe.encode_prompt = lambda *args, **kwargs: kept(_key(args, kwargs))
        for name in self._then_called:  # not by setattr: pipelines accept models only
            pipe.__dict__[name] = lambda *args, _name=name, **kwargs: kept(_name + _key(_marks(args), _marks(kwargs)))

    def _recording(self, encode_prompt: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            result = encode_prompt(*args, **{**kwargs, "device": device})
            kept = _marks(result) if self._then_called else result
            self._results[_key(args, kwargs)] = replace(Tensor, lambda x: x.cpu(), kept)
            return replace(Tensor, lambda x: x.to(kwargs.get("device") or device), result)

        return record

    def _recording_module(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            device = next(tensors((args, kwargs))).device
            result = forward(*args, **kwargs)
            key = name + _key(_marks(args), _marks(kwargs))
            self._results[key] = replace(Tensor, lambda x: x.cpu(), result)
            return replace(Tensor, lambda x: x.to(device), result)

        return record


def _marks(values: Any) -> Any:
    """Keep the first channel of embeddings [b, length, channels], and all other values."""
    return replace(Tensor, lambda x: x[..., :1].clone() if x.dim() == 3 else x, values)


def _stop(*_: object) -> NoReturn:
    raise _EncodedError


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the arguments of `encode_prompt` as text, without the device. Pictures and arrays are hashed."""
    arguments = (args, sorted((name, x) for name, x in kwargs.items() if name != "device"))
    return repr(replace(_PIXELS, _digest, arguments))


def _digest(picture: Any) -> tuple[str, ...]:
    """Return the shape, the type and a hash of the values of a picture, tensor or array."""
    array = np.ascontiguousarray(picture.detach().cpu().float() if isinstance(picture, Tensor) else picture)
    return str(array.shape), str(array.dtype), hashlib.sha256(array.tobytes()).hexdigest()


def _fits(modules: Sequence[nn.Module], device: torch.device) -> bool:
    """Return whether the free memory of a device is enough for the modules."""
    if device.type != "cuda":
        return False
    needed = sum(x.numel() * x.element_size() for module in modules for x in module.parameters())
    return torch.cuda.mem_get_info(device)[0] > _MARGIN * needed
