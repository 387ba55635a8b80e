"""If nothing fits: the missing memory, and the cheapest change with which a layout fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lightning_cp.finetune.adapters.lora import LoraSettings
from lightning_cp.planning.layouts import described
from lightning_cp.planning.request import Excluded, Request, closest
from lightning_cp.planning.step import Layout

_LORA_RANK = 16
_FACTORS = (2, 4, 8, 16)  # of ranks


@dataclass(frozen=True)
class Change:
    """A change of the request. Attributes: name: as settings; "": only the layout differs."""

    name: str
    request: Request
    layout: Layout


def what_is_missing(
    request: Request, excluded: list[Excluded], fits: Callable[[Change], bool] | None, *, can_checkpoint: bool
) -> str:
    """Return how much memory is missing, and the cheapest change that fits.

    Args:
        fits: dry-runs a change; None: no change is searched.
        can_checkpoint: the model has activation checkpointing.
    """
    found = closest(excluded)
    stage = f" to {found.stage}" if found.stage else ""
    least = "at least " if found.is_least else ""
    missing = f"{least}{request.missing_gb(found):.3g} GB more than {request.memory:.4g} GB{stage}"
    text = f"nothing fits: {described(found.layout)} needs {missing}"
    if fits is None:
        return text
    tried = []
    for change in changes(request, found.layout, can_checkpoint=can_checkpoint):
        if fits(change):
            return f"{text}; {_would_fit(change)}"
        tried.append(change.name)
    hint = "; pipe.vae.enable_tiling() in Python lowers the memory of the decode" if found.stage == "decode" else ""
    names = ", ".join(dict.fromkeys(x for x in tried if x))
    return f"{text}; none of these would fit: {names}. Use a smaller size, or devices with more memory{hint}"


def _would_fit(change: Change) -> str:
    layout = described(change.layout)
    return f"{change.name} would fit ({layout})" if change.name else f"{layout} would fit"


def changes(request: Request, smallest: Layout, *, can_checkpoint: bool) -> Iterator[Change]:
    """Yield changes, the cheapest first: those that cost time, then fewer samples, LoRA, and more ranks.

    Args: smallest: the layout that lacks the least memory.
    """
    trains = request.task == "train"
    sharded = (smallest.ranks if trains else smallest.ring * smallest.ulysses) > 1
    layout = replace(smallest, sharded=sharded, checkpointing="full" if trains and can_checkpoint else "none")
    if request.fixed:
        yield Change("", request, layout)
    if trains and can_checkpoint and request.mlp_tiles is None:
        yield Change("mlp_tiles=auto", replace(request, mlp_tiles="auto"), layout)
    if not trains and request.pipeline is not None and request.stages == "together":
        yield Change("stages=offload", replace(request, stages="offload"), layout)
    if request.batch_size > 1 and request.of_one_sample is not None:
        yield Change("batch_size=1", request.of_one_sample(), layout)
    if trains and request.lora is None:
        yield Change(f"lora.rank={_LORA_RANK}", replace(request, lora=LoraSettings(rank=_LORA_RANK)), layout)
    for factor in _FACTORS:
        more = replace(layout, ring=layout.ring * factor, sharded=True)
        yield Change(f"ranks={more.ranks}", replace(request, ranks=more.ranks), more)
