"""Count the activations of a training step per rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_cp.finetune.adapters.lora import add_lora
from lightning_cp.finetune.settings import LoraSettings
from lightning_cp.planning.devices import DEVICES
from lightning_cp.planning.dry_run import dry_run
from lightning_cp.planning.models import MediaSize, diffusers_model, of_dtype
from lightning_cp.planning.step import Checkpointing, Layout, Step

KIND = "WanTransformer3DModel"


@dataclass(frozen=True)
class ActivationsRow:
    """Activations of one rank. Attributes: share: activations times ranks, relative to those of one rank."""

    checkpointing: Checkpointing
    ranks: int
    activation_bytes: int
    share: float


def run_wan(config: Mapping[str, Any], size: MediaSize, layout: Layout, *, lora_rank: int | None) -> Step:
    """Dry-run a training step of a Wan transformer in bfloat16, on H100s."""
    model = diffusers_model(KIND, config, size)
    return dry_run(
        model.build,
        of_dtype(model.inputs, torch.bfloat16),
        layout,
        device=DEVICES["h100"].profile(),
        adapt=None if lora_rank is None else partial(add_lora, settings=LoraSettings(rank=lora_rank)),
    )


def activation_rows(
    config: Mapping[str, Any],
    size: MediaSize,
    *,
    lora_rank: int,
    ranks: Sequence[int],
    checkpointing: Sequence[Checkpointing] = ("none", "full"),
) -> Iterator[ActivationsRow]:
    """Yield a row for each kind of checkpointing and number of ranks of a ring.

    Args: ranks: the first is 1.
    """
    for kind in checkpointing:
        one = 0
        for n in ranks:
            layout = Layout(ring=n, rotate_method="alltoall", checkpointing=kind)
            counted = run_wan(config, size, layout, lora_rank=lora_rank).peak["activations"]
            one = one or counted
            yield ActivationsRow(kind, n, counted, counted * n / one)
