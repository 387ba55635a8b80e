"""Oracle: if the transformer is replaced by the exact target, sampling must return the encoded picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cp.finetune.families import Family, InputOptions, Media, StoredBatch, collate
from lightning_cp.finetune.families.encode import decode_latents
from lightning_cp.finetune.family_check.pipeline_calls import call
from lightning_cp.finetune.family_check.proof import Proof, store

_STEPS = 8
_EXACT, _MULTISTEP = 1e-5, 1e-2  # multistep schedulers round times to integers, and extrapolate
_BFLOAT16 = 8e-2  # latents are rounded in each of 8 steps, and decoded in bfloat16: up to 5e-2 was measured
_ONE_STEP = ("FlowMatchEulerDiscreteScheduler", "CogVideoXDDIMScheduler", "DDIMScheduler")


def oracle_proof(pipe: Any, family: Family, captions: Sequence[str], media: Media) -> Proof:
    """Sample with the exact target as the transformer's output, and compare with the encoded and decoded pixels.

    The target is computed from the latents and the time that the transformer receives. With a wrong packing, sign, time
    scale or normalisation, the pixels are therefore different.
    """
    stored = collate(store(family, pipe, captions, media), family.text)
    shape = call(pipe, family, captions, media, num_inference_steps=1, output_type="latent").outputs[0].shape
    answer = _Oracle(family, stored, shape[1:])
    record = call(
        pipe,
        family,
        captions,
        media,
        answer=answer,
        num_inference_steps=_STEPS,
        output_type="pt",
    )
    expected = decode_latents(pipe.vae, stored["latents"])
    result = _pixels(record.result, expected)
    spread = float(expected.max() - expected.min())
    error = float((result.double() - expected.double()).abs().max()) / spread
    tolerance = _EXACT if type(pipe.scheduler).__name__ in _ONE_STEP else _MULTISTEP
    if pipe.vae.dtype == torch.bfloat16:
        tolerance = _BFLOAT16
    return Proof("oracle", error, tolerance, "" if error <= tolerance else "decoded pixels")


class _Oracle:
    """Compute the exact target for the arguments of a transformer's call, in the layout of its output.

    `inputs` and `prediction` only move values (and change signs), so their adjoints invert them.
    """

    def __init__(self, family: Family, stored: StoredBatch, output_shape: Sequence[int]) -> None:
        self._family, self._stored, self._output_shape = family, stored, output_shape
        self._clean = family.clean(stored)

    @torch.enable_grad()
    def __call__(self, arguments: dict[str, Any]) -> Tensor:
        given = arguments["hidden_states"]
        copies = len(given) // len(self._clean)  # both CFG branches may be in one batch
        branches = zip(given.chunk(copies), arguments["timestep"].chunk(copies), strict=True)
        return torch.cat([self._answer(part, timestep) for part, timestep in branches]).to(given.dtype)

    def _answer(self, given: Tensor, timestep: Tensor) -> Tensor:
        clean = self._clean
        noisy = _adjoint(lambda x: self._inputs(x, self._times(len(x), 0))["hidden_states"], clean.shape, given.float())
        time = timestep.flatten(1).amax(dim=1) if timestep.dim() > 1 else timestep
        target = self._target(noisy, time)
        known = self._family.given_mask(self._stored, clean)
        if known is not None:
            target = torch.where(known, 0.0, target)
        shape = (len(given), *self._output_shape)
        return _adjoint(lambda x: self._family.prediction(x, noisy), shape, target)

    def _target(self, noisy: Tensor, timestep: Tensor) -> Tensor:
        defaults, dims = self._family.objective, [1] * (noisy.dim() - 1)
        if defaults.prediction == "flow":
            return (noisy - self._clean) / self._sigma(timestep).view(-1, *dims)
        level = torch.tensor(defaults.alphas_cumprod)[timestep.long()].view(-1, *dims)
        noise = (noisy - level.sqrt() * self._clean) / (1 - level).sqrt()
        return noise if defaults.prediction == "epsilon" else level.sqrt() * noise - (1 - level).sqrt() * self._clean

    def _sigma(self, timestep: Tensor) -> Tensor:
        """Invert the family's map of sigma to `timestep`, which is linear."""
        ends = [self._inputs(self._clean, self._times(len(timestep), x))["timestep"] for x in (0.25, 0.75)]
        low, high = (float(x.max()) for x in ends)
        return (0.25 + 0.5 * (timestep.double() - low) / (high - low)).float()

    def _times(self, number: int, sigma: float) -> Tensor:
        if self._family.objective.prediction == "flow":
            return torch.full([number], sigma)
        return torch.zeros(number, dtype=torch.int64)

    def _inputs(self, noisy: Tensor, times: Tensor) -> dict[str, Any]:
        return self._family.inputs(noisy, times, self._stored, InputOptions())


def _adjoint(function: Callable[[Tensor], Tensor], shape: Sequence[int], value: Tensor) -> Tensor:
    """Apply the adjoint of a linear (or affine) function to a value."""
    x = torch.zeros(tuple(shape), requires_grad=True)
    (grad,) = torch.autograd.grad(function(x), x, value)
    return grad


def _pixels(result: Any, like: Tensor) -> Tensor:
    """Return a pipeline's pixels in the VAE's layout: [b, 3, h, w] or [b, 3, f, h, w]."""
    found = result.images if hasattr(result, "images") else result.frames
    found = torch.as_tensor(found).float().cpu()
    if like.dim() == 5 and found.dim() == 5:
        return found.permute(0, 2, 1, 3, 4)
    return found.reshape(like.shape)
