"""The steps that all objectives share: draw noise and times, drop captions, compute the weighted loss in float32."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.wrappers import is_wrapped
from torch import Tensor, nn

from lightning_cp.data import RandomStream
from lightning_cp.engine.installed import sessions_in
from lightning_cp.errors import FamilyError
from lightning_cp.finetune.families import Family, InputOptions, StoredBatch
from lightning_cp.finetune.families.latents import Latents, by_name, like, main_latents
from lightning_cp.finetune.settings import ObjectiveSettings
from lightning_cp.training.noise import FirstIndex, indices_of, sample_dropped, sample_noise

_NEXT_STREAM = 100  # between the random streams of two latents of one sample, see `RandomStream`


@dataclass(frozen=True)
class Noised:
    """A batch between data and noise.

    Attributes:
        noisy: noisy latents, float32 [b, ...], or several by name.
        times: times of the main latents, [b]; float32 sigma for flow matching, otherwise int64. See
            `Family.latent_times`.
        target: target of the transformer's prediction, like `noisy`.
        loss_mask: weight of each element in the loss, broadcastable to the target, by name; others have weight 1.
        stored: the stored batch, with dropped captions replaced.
    """

    noisy: Latents
    times: Tensor
    target: Latents
    loss_mask: dict[str, Tensor]
    stored: StoredBatch


@dataclass(frozen=True, kw_only=True)
class Objective(ObjectiveSettings, ABC):
    """A training objective for any `Family`.

    All random draws depend only on (seed, step, index of the sample in the global batch), so the loss does not depend
    on the number of ranks. x0, noise, target and loss are float32; only the transformer's arguments have its dtype.

    Args:
        seed: seed of the run.
        cond_dropout: probability of training a sample with the empty caption, for CFG.
        guidance: value of the guidance embedding; None: the family's.
        sample_posterior: draw latents from the VAE's distribution; False: use its mode; None: the family's default.
        dtype: dtype of the transformer's activations; None: the dtype of its parameters.
        loss_dtype: dtype of latents, target and loss. float64 is for proofs.
        weighting: weight of a sample's loss by its noise level: "min_snr", and with flow matching "cosmap" or
            "sigma_sqrt", as diffusers names them; None: 1.
        min_snr_gamma: the largest signal-to-noise ratio that counts with "min_snr".
        huber_c: pseudo-Huber error, which is linear for differences that are large against this number; None: the
            squared error.
    """

    dtype: torch.dtype | None = None
    loss_dtype: torch.dtype = torch.float32

    def loss(
        self,
        transformer: nn.Module,
        family: Family,
        stored: StoredBatch,
        *,
        step: int,
        first_index: FirstIndex | None = None,
    ) -> Tensor:
        """Return the loss of a batch, a float32 scalar: the mean over samples of `sample_losses`.

        Args:
            transformer: diffusers transformer, context-parallel or not.
            family: from `family_for` or `load_family`.
            stored: batch of this data rank, from `collate`.
            step: training step.
            first_index: index of the batch's first sample in the global batch, or of each sample; None: data rank times
                batch size.
        Ranks: all ranks of a context group, with the same batch; each returns the same loss.
        """
        return self.sample_losses(transformer, family, stored, step=step, first_index=first_index).mean()

    def sample_losses(
        self,
        transformer: nn.Module,
        family: Family,
        stored: StoredBatch,
        *,
        step: int,
        first_index: FirstIndex | None = None,
        times: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of each sample, float32 [b]: the mean over its elements, weighted by the loss mask.

        The mask is the stored tensor "loss_mask", if there is one, without the latents that are given. A sample with
        mask 0 everywhere has loss 0. With several latents (a clip and its sound), their losses are added; "loss_mask"
        is then for the first of them, and the others have masks of their own ("sound_loss_mask").

        Args:
            times: time of each sample, as `times_at` returns them; None: drawn.
        Other arguments: see `loss`.
        """
        first = self.first_index(transformer, stored) if first_index is None else first_index
        if family.one_per_call and len(stored) > 1:
            losses = [
                self.sample_losses(
                    transformer,
                    family,
                    stored.samples(i, i + 1),
                    step=step,
                    first_index=index,
                    times=None if times is None else times[i : i + 1],
                )
                for i, index in enumerate(indices_of(first, len(stored)))
            ]
            return torch.cat(losses)
        noised = self.noised(family, stored, step=step, first_index=first, times=times)
        guidances = (self.guidance, family.objective.guidance, 1.0)
        guidance = next(value for value in guidances if value is not None)
        options = InputOptions(dtype=self.dtype or activation_dtype(transformer), guidance=guidance)
        each = family.latent_times(noised.times)
        arguments = family.inputs(noised.noisy, each, noised.stored, options)
        output = first_outputs(call_unrounded(transformer, arguments), family.outputs)
        predicted, target = by_name(family.prediction(output, noised.noisy)), by_name(noised.target)
        masks = noised.loss_mask
        errors = {name: sample_means(self._error(predicted[name], x), masks.get(name)) for name, x in target.items()}
        return _sum([self._at_time(family, errors, name, time) for name, time in by_name(each).items()])

    def _at_time(self, family: Family, errors: dict[str, Tensor], name: str, time: Tensor) -> Tensor:
        """Return the weighted loss of the latents with one time. Args: name: name of the latents; "": all latents."""
        loss = _sum([x for key, x in errors.items() if name in ("", key)])
        if self.weighting is None:
            return loss
        sigma = self.sigma(family, time).to(loss.dtype)
        return loss * loss_weight(self.weighting, sigma, family.objective.prediction, self.min_snr_gamma)

    def noised(
        self,
        family: Family,
        stored: StoredBatch,
        *,
        step: int,
        first_index: FirstIndex = 0,
        times: Tensor | None = None,
    ) -> Noised:
        """Draw noise and times for a batch, without running the transformer.

        Args: times: time of each sample, as `times_at` returns them; None: drawn.
        """
        key: dict[str, Any] = {"seed": self.seed, "step": step, "first_index": first_index}
        clean = self._clean(family, stored)
        sampled = family.objective.posterior == "sample" if self.sample_posterior is None else self.sample_posterior
        if sampled and family.objective.posterior == "mode":
            raise FamilyError(f"sample_posterior=True, but {family.name} stores only the mode of its latents")
        if sampled:
            clean = self._clean(family, stored, like(clean, _noise(clean, **key, stream=RandomStream.POSTERIOR)))
        x0, noise = by_name(clean), _noise(clean, **key, stream=RandomStream.NOISE)
        if times is None:
            times = self.times(family, main_latents(clean), step=step, first_index=first_index)
        noisy, target, masks = {}, {}, {}
        each = by_name(family.latent_times(times))
        for name, x in x0.items():
            noisy[name], target[name] = self.mix(family, x, noise[name], each.get(name, times))
            if (mask := stored.get(f"{name}_loss_mask" if noisy.keys() != {name} else "loss_mask")) is not None:
                masks[name] = mask
        for name, given in by_name(family.given_mask(stored, clean)).items():
            noisy[name] = torch.where(given, x0[name], noisy[name])
            masks[name] = torch.where(given, 0.0, masks[name]) if name in masks else ~given
        if self.cond_dropout:
            dropped = sample_dropped(len(stored), self.cond_dropout, **key, device=main_latents(clean).device)
            stored = stored.without_text(dropped, family.text)
        return Noised(like(clean, noisy), times, like(clean, target), masks, stored)

    def _clean(self, family: Family, stored: StoredBatch, noise: Latents | None = None) -> Latents:
        clean: Latents = family.clean(stored, noise)
        return like(clean, {name: x.to(self.loss_dtype) for name, x in by_name(clean).items()})

    @abstractmethod
    def times(self, family: Family, clean: Tensor, *, step: int, first_index: FirstIndex) -> Tensor:
        """Draw the time of each sample, [b]."""

    @abstractmethod
    def times_at(self, family: Family, clean: Tensor, p: float) -> Tensor:
        """Return the p-quantile of the times that `times` draws, once for each sample, [b].

        Args:
            clean: x0 [b, ...], the main one of several; the shift of flow times may depend on its size.
            p: in (0, 1); 0.5 is the median.
        """

    @abstractmethod
    def sigma(self, family: Family, times: Tensor) -> Tensor:
        """Return sigma, the factor of the noise in the noisy latents, at each time: float32 [b], from 0 to 1."""

    @abstractmethod
    def mix(self, family: Family, clean: Tensor, noise: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Return the noisy latents and the target, both like `clean`."""

    def _error(self, predicted: Tensor, target: Tensor) -> Tensor:
        difference = predicted.to(target.dtype) - target
        return difference.square() if self.huber_c is None else pseudo_huber(difference, self.huber_c)

    @staticmethod
    def first_index(transformer: nn.Module, stored: StoredBatch) -> int:
        """Return the index of a batch's first sample in the global batch: data rank times batch size."""
        for session in sessions_in(transformer):
            return session.groups.data_rank * len(stored)
        return dist.get_rank() * len(stored) if dist.is_available() and dist.is_initialized() else 0


def _sum(losses: list[Tensor]) -> Tensor:
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum(dim=0)


def _noise(clean: Latents, *, stream: int, **key: Any) -> dict[str, Tensor]:
    """Draw noise for each of the latents, by name; for the main ones from `stream` itself."""
    return {
        name: sample_noise(x.shape, **key, stream=stream + _NEXT_STREAM * i, device=x.device, dtype=x.dtype)
        for i, (name, x) in enumerate(by_name(clean).items())
    }


def first_outputs(output: Any, number: int) -> Any:
    """Return the first output of a transformer, or a tuple of several.

    Args: output: a tensor, a tuple, or diffusers' output class.
    """
    if isinstance(output, Tensor):
        return output
    return output[0] if number == 1 else tuple(output[i] for i in range(number))


def activation_dtype(transformer: nn.Module) -> torch.dtype:
    """Return the dtype in which a transformer takes its inputs: that of its frozen or trained base weights."""
    inner: Any = transformer.module if is_wrapped(transformer) else transformer  # Fabric's own module is float32
    dtype = getattr(inner, "dtype", None)  # diffusers models
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    return next((p.dtype for p in inner.parameters() if p.is_floating_point()), torch.float32)


# Of flow matching, by sigma: those of Stable Diffusion 3 (arXiv:2403.03206), with diffusers' names.
_OF_FLOW: dict[str, Callable[[Tensor], Tensor]] = {
    "cosmap": lambda sigma: 2 / (math.pi * (1 - 2 * sigma + 2 * sigma.square())),
    "sigma_sqrt": lambda sigma: sigma**-2,
}


def loss_weight(weighting: str, sigma: Tensor, prediction: str, gamma: float) -> Tensor:
    """Return the weight of each sample's loss, [b].

    "min_snr" (arXiv:2303.09556) weights the squared error of x0 with min(SNR, gamma), where SNR is (signal / sigma)².
    For the error of the prediction, this is min(1, gamma / SNR) for noise, and min(SNR, gamma)·sigma² for a velocity.

    Args:
        sigma: factor of the noise, [b].
        prediction: "flow", "epsilon" or "v_prediction".
    """
    if weighting in _OF_FLOW:
        return _OF_FLOW[weighting](sigma)
    signal_squared = (1 - sigma).square() if prediction == "flow" else 1 - sigma.square()
    if prediction == "epsilon":
        return torch.clamp(gamma * sigma.square() / signal_squared, max=1.0)
    return torch.minimum(signal_squared, gamma * sigma.square())


def pseudo_huber(error: Tensor, c: float) -> Tensor:
    """Return 2c(√(error² + c²) - c): error² for small errors, and linear for large ones (arXiv:2310.14189)."""
    squared = error.square()
    return 2 * c * squared / ((squared + c * c).sqrt() + c)  # the same, without the rounding of a difference


def sample_means(errors: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the weighted mean of the errors of each sample, [b]. A sample with weight 0 everywhere has 0.

    Args: errors: [b, ...]. weights: broadcastable to them; None: 1.
    """
    if weights is None:
        return errors.flatten(1).mean(dim=1)
    weights = weights.to(errors.dtype).expand_as(errors)
    total = weights.flatten(1).sum(dim=1)
    return (errors * weights).flatten(1).sum(dim=1) / torch.where(total > 0, total, 1.0)


class _Arguments:
    """Keyword arguments that Fabric's precision plugins do not look into: no dict, list or dataclass."""

    __slots__ = ("kwargs",)

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.kwargs = kwargs


def call_unrounded(transformer: nn.Module, arguments: dict[str, Any]) -> Any:
    """Return `transformer(**arguments)`, with every argument in the dtype that it has here.

    `fabric.setup(transformer)` returns a module that casts all floating-point arguments to the precision's dtype. Times
    would be rounded: bfloat16 has about 500 values for 1000 times. The arguments therefore pass it in one opaque
    object, and a hook of the module that was set up takes them out.
    """
    if not is_wrapped(transformer):
        return transformer(**arguments)
    set_up: Any = transformer.module
    handle = set_up.register_forward_pre_hook(_unpack, with_kwargs=True, prepend=True)
    try:
        return transformer(_Arguments(arguments))
    finally:
        handle.remove()


def _unpack(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    assert len(args) == 1, "the object is passed on as it is"
    return (), args[0].kwargs
