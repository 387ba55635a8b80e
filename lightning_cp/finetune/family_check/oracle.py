"""Oracle: if the transformer is replaced by the exact target, sampling must return the encoded picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cp.finetune.families import Family, InputOptions, Media, StoredBatch, collate
from lightning_cp.finetune.families.latents import Latents, by_name, like, main_latents
from lightning_cp.finetune.family_check.pipeline_calls import call
from lightning_cp.finetune.family_check.proof import Proof, store
from lightning_cp.nest import replace, tensors

_STEPS = 8
_EXACT, _MULTISTEP = 1e-5, 1e-2  # multistep schedulers round times to integers, and extrapolate
_BFLOAT16 = 8e-2  # latents are rounded in each of 8 steps, and decoded in bfloat16: up to 5e-2 was measured
_ONE_STEP = ("FlowMatchEulerDiscreteScheduler", "CogVideoXDDIMScheduler", "DDIMScheduler", "MiniMaxH3Scheduler")


def oracle_proof(pipe: Any, family: Family, captions: Sequence[str], media: Media) -> Proof:
    """Sample with the exact target as the transformer's output, and compare with the encoded and decoded pixels.

    The target is computed from the latents and the time that the transformer receives. With a wrong packing, sign, time
    scale or normalisation, the pixels are therefore different.
    """
    stored = collate(store(family, pipe, captions, media), family.text)
    # two steps: with one, schedulers with `shift_terminal` divide by 0
    output = call(pipe, family, captions, media, num_inference_steps=2, output_type="latent").outputs[0]
    answer = _Oracle(family, stored, output)
    record = call(pipe, family, captions, media, answer=answer, num_inference_steps=_STEPS, output_type="pt")
    errors = {}
    for name, expected in family.decoded(pipe, stored).items():
        result = torch.as_tensor(getattr(record.result, name)) if name else _pixels(record.result, expected)
        spread = float(expected.max() - expected.min())
        errors[name or "pixels"] = float((result.double() - expected.double()).abs().max()) / spread
    worst = max(errors, key=lambda name: errors[name])
    error = errors[worst]
    tolerance = _EXACT if type(pipe.scheduler).__name__ in _ONE_STEP else _MULTISTEP
    if pipe.vae.dtype == torch.bfloat16:
        tolerance = _BFLOAT16
    return Proof("oracle", error, tolerance, "" if error <= tolerance else f"decoded {worst}")


class _Oracle:
    """Compute the exact target for the arguments of a transformer's call, in the layout of its outputs.

    `inputs` and `prediction` only move values (and change signs), so their adjoints invert them.
    """

    def __init__(self, family: Family, stored: StoredBatch, output: Any) -> None:
        self._family, self._stored = family, stored
        self._clean = family.clean(stored)
        self._samples = len(main_latents(self._clean))
        self._output = _first(output, self._samples)

    @torch.enable_grad()
    def __call__(self, arguments: dict[str, Any]) -> Any:
        entered = [arguments[name] for name in self._family.entries]
        times, samples = arguments[self._family.time_entry], self._samples
        starts = range(0, len(entered[0]), samples)  # both CFG branches may be in one batch
        answers = [
            self._answer([x[i : i + samples] for x in entered], times[i : i + samples] if times.dim() else times)
            for i in starts
        ]
        answered = replace(Tensor, lambda x: x.to(next(tensors(entered)).dtype), answers)
        return answered[0] if len(answers) == 1 else _joined(answered)

    def _answer(self, entered: list[Any], timestep: Tensor) -> Any:
        clean = by_name(self._clean)
        noisy = _adjoint(
            lambda x: self._entered(like(self._clean, x), self._times(0)), clean, replace(Tensor, Tensor.float, entered)
        )
        time = self._time(timestep)
        if self._family.objective.prediction == "flow":
            time = self._sigma(time)
        times = by_name(self._family.latent_times(time))
        known = by_name(self._family.given_mask(self._stored, self._clean))
        targets = {name: self._target(noisy[name], x, times.get(name, time)) for name, x in clean.items()}
        targets |= {name: torch.where(given, 0.0, targets[name]) for name, given in known.items()}
        outputs = dict(enumerate(tensors(self._output)))

        def predicted(values: dict[int, Tensor]) -> list[Tensor]:
            left = iter(values.values())
            output = replace(Tensor, lambda _: next(left), self._output)
            return list(by_name(self._family.prediction(output, like(self._clean, noisy))).values())

        answer = iter(_adjoint(predicted, outputs, list(targets.values())).values())
        return replace(Tensor, lambda _: next(answer), self._output)

    def _target(self, noisy: Tensor, clean: Tensor, time: Tensor) -> Tensor:
        defaults, dims = self._family.objective, [1] * (noisy.dim() - 1)
        if defaults.prediction == "flow":
            return (noisy - clean) / time.view(-1, *dims)
        level = torch.tensor(defaults.alphas_cumprod)[time.long()].view(-1, *dims)
        noise = (noisy - level.sqrt() * clean) / (1 - level).sqrt()
        return noise if defaults.prediction == "epsilon" else level.sqrt() * noise - (1 - level).sqrt() * clean

    def _time(self, timestep: Tensor) -> Tensor:
        """Return the time of each sample's main latents, [samples], from the argument of the transformer."""
        return timestep.flatten(1).amax(dim=1) if timestep.dim() > 1 else timestep[: self._samples]

    def _sigma(self, time: Tensor) -> Tensor:
        """Invert the family's map of sigma to the time that the transformer takes, which is linear."""
        ends = [self._arguments(self._clean, self._times(x))[self._family.time_entry] for x in (0.25, 0.75)]
        low, high = (float(self._time(x).max()) for x in ends)
        return (0.25 + 0.5 * (time.double() - low) / (high - low)).float()

    def _times(self, sigma: float) -> Tensor:
        if self._family.objective.prediction == "flow":
            return torch.full([self._samples], sigma)
        return torch.zeros(self._samples, dtype=torch.int64)

    def _arguments(self, noisy: Latents, times: Tensor) -> dict[str, Any]:
        return self._family.inputs(noisy, self._family.latent_times(times), self._stored, InputOptions())

    def _entered(self, noisy: Latents, times: Tensor) -> list[Any]:
        arguments = self._arguments(noisy, times)
        return [arguments[name] for name in self._family.entries]


def _first(output: Any, samples: int) -> Any:
    """Return the outputs of the first samples: both CFG branches may be in a batch, or in a list."""
    return tuple(_first(x, samples) for x in output) if isinstance(output, tuple) else output[:samples]


def _adjoint(function: Callable[[Any], Any], shaped: Mapping[Any, Tensor], value: Any) -> dict[Any, Tensor]:
    """Apply the adjoint of a linear (or affine) function to a nest of values.

    Args: function: takes tensors by name. shaped: tensors with the shapes that it takes.
    """
    x = {name: torch.zeros(like.shape, requires_grad=True) for name, like in shaped.items()}
    grads = torch.autograd.grad(list(tensors(function(x))), list(x.values()), list(tensors(value)))
    return dict(zip(x, grads, strict=True))


def _joined(answers: list[Any]) -> Any:
    first = answers[0]
    if isinstance(first, Tensor):
        return torch.cat(answers)
    if isinstance(first, tuple):
        return tuple(_joined(list(parts)) for parts in zip(*answers, strict=True))
    return [x for answer in answers for x in answer]


def _pixels(result: Any, like: Tensor) -> Tensor:
    """Return a pipeline's pixels in the VAE's layout: [b, 3, h, w] or [b, 3, f, h, w]."""
    found = result.images if hasattr(result, "images") else result.frames
    found = torch.as_tensor(found).float().cpu()
    if like.dim() == 5 and found.dim() == 5:
        return found.permute(0, 2, 1, 3, 4)
    return found.reshape(like.shape)
