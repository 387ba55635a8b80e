"""Sampling with every rank of a run: each data rank draws its share, each context group shares a sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_cp.data import RandomStream
from lightning_cp.sampling.ode import integrate_flow
from lightning_cp.training.noise import sample_noise
from lightning_cp.training.ranks import DataShard, Ranks


@dataclass(frozen=True)
class SamplingSettings:
    """How many samples and how they are drawn; see `integrate_flow`."""

    count: int
    num_steps: int
    guidance: float
    seed: int


@dataclass(frozen=True)
class Samples:
    """Samples [n, ...] on the CPU and their labels [n], equal on every rank."""

    pixels: Tensor
    labels: Tensor


def draw_samples(
    ranks: Ranks,
    model: nn.Module,
    shape: Sequence[int],
    *,
    settings: SamplingSettings,
    num_classes: int,
    data_shard: DataShard,
    labels: Tensor | None = None,
    between: Callable[[], None] = lambda: None,
) -> Samples:
    """Draws samples of all classes in turn, through the wrapped model. Call it on every rank.

    The same seed gives the same samples (to rounding) at every number of ranks.

    Args:
        ranks: of the run.
        model: as Fabric wrapped it, or what stands for that.
        shape: of one sample.
        settings: how many and how.
        num_classes: labels 0 to num_classes - 1, and num_classes for "no condition".
        data_shard: of this rank in the data; each data rank draws an equal share.
        labels: of the samples, [settings.count]; all classes in turn if left out.
        between: see `integrate_flow`.
    """
    share = -(-settings.count // data_shard.size)
    first = data_shard.rank * share
    everyones = torch.arange(settings.count) % num_classes if labels is None else labels
    own = everyones[torch.arange(first, first + share) % settings.count]
    noise = sample_noise(
        (share, *shape), seed=settings.seed, step=0, first_index=first, stream=RandomStream.SAMPLE, device=ranks.device
    )
    was_training = model.training
    model.eval()
    pixels = integrate_flow(
        model,
        noise,
        own.to(ranks.device),
        null_label=num_classes,
        guidance=settings.guidance,
        num_steps=settings.num_steps,
        between=between,
    )
    model.train(was_training)
    gathered = gather_shares(ranks, pixels, data_shard)
    return Samples(gathered[: settings.count].cpu(), everyones)


def gather_shares(ranks: Ranks, share: Tensor, data_shard: DataShard) -> Tensor:
    """The shares of all data ranks, [n, ...] each, one after another, on every rank: [size * n, ...].

    Ranks: the whole world, with shares of one shape.
    """
    everyone = torch.zeros(data_shard.size, *share.shape, device=ranks.device, dtype=share.dtype)
    if data_shard.is_first:  # one rank of a context group speaks for it, so that the sum is exact
        everyone[data_shard.rank] = share
    gathered: Tensor = ranks.all_reduce(everyone, reduce_op="sum")
    return gathered.flatten(0, 1)
