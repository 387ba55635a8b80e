"""Draw samples on all ranks: each data rank draws its share; a context group shards each sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_cp.comm.agree import gather_objects
from lightning_cp.data import RandomStream
from lightning_cp.sampling.ode import integrate_flow
from lightning_cp.training.noise import sample_noise
from lightning_cp.training.ranks import DataShard, Ranks


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings: number of samples, number of steps, guidance scale, seed; see `integrate_flow`."""

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
    """Draw samples with the wrapped model, cycling through the classes. Call it on every rank.

    The same seed gives the same samples (up to rounding) for any number of ranks.

    Args:
        ranks: collectives of the run.
        model: the Fabric-wrapped model, or a replacement with the same call.
        shape: shape of one sample.
        settings: number of samples and how to draw them.
        num_classes: number of classes; labels are 0 to num_classes - 1, and num_classes means "no condition".
        data_shard: this rank's data shard; each data rank draws an equal share.
        labels: labels of the samples, [settings.count]; default: all classes in turn.
        between: see `integrate_flow`.
    """
    share = -(-settings.count // data_shard.size)
    first = data_shard.rank * share
    all_labels = torch.arange(settings.count) % num_classes if labels is None else labels
    own_labels = all_labels[torch.arange(first, first + share) % settings.count]
    noise = sample_noise(
        (share, *shape), seed=settings.seed, step=0, first_index=first, stream=RandomStream.SAMPLE, device=ranks.device
    )
    was_training = model.training
    model.eval()
    pixels = integrate_flow(
        model,
        noise,
        own_labels.to(ranks.device),
        null_label=num_classes,
        guidance=settings.guidance,
        num_steps=settings.num_steps,
        between=between,
    )
    model.train(was_training)
    gathered = gather_shares(ranks, pixels, data_shard)
    return Samples(gathered[: settings.count].cpu(), all_labels)


def gather_shares(ranks: Ranks, share: Tensor, data_shard: DataShard) -> Tensor:
    """Gather the shares of all data ranks, [n, ...] each, in data-rank order: [size * n, ...] on every rank.

    Ranks: the whole world, with shares of equal shape.
    """
    gathered: Tensor = ranks.all_gather(share).reshape(-1, *share.shape)
    # CFG branches and stages of blocks have the same share, and so have all ranks of a strategy without data groups.
    return gathered[:: len(gathered) // data_shard.size].flatten(0, 1)


def gather_samples(ranks: Ranks, share: Sequence[Tensor], data_shard: DataShard) -> list[Tensor]:
    """Gather the shares of all data ranks in data-rank order, on every rank; samples may have different shapes.

    Ranks: the whole world, with equally many samples each.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    all_shapes = gather_objects([tuple(x.shape) for x in share], world)
    shapes = [shape for shapes in all_shapes[:: len(all_shapes) // data_shard.size] for shape in shapes]
    longest = max(map(prod, shapes))
    padded = torch.stack([pad(x.flatten(), (0, longest - x.numel())) for x in share])
    gathered = gather_shares(ranks, padded, data_shard)
    return [x[: prod(shape)].view(shape) for x, shape in zip(gathered, shapes, strict=True)]
