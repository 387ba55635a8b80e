"""All ways in which a number of ranks can divide a step, and why some of them are not possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from lightning_cp.config import ROTATE_METHODS
from lightning_cp.planning.models import PlannedModel
from lightning_cp.planning.step import Checkpointing, Layout

Task = Literal["train", "sample"]
_DEGREES = ("data", "cfg", "ring", "ulysses")
_FIXED = (*_DEGREES, "sharded", "checkpointing", "rotate_method")
LEVELS: tuple[Checkpointing, ...] = ("none", "selective", "full")  # from the most memory to the least


def layouts(ranks: int, task: Task, fixed: Mapping[str, object] | None = None) -> Iterator[Layout]:
    """Yield all layouts of so many ranks, the smallest context degrees first.

    Training: data × ring × ulysses. Sampling: also cfg. Weights are sharded over all ranks in training, and over a
    context group in sampling.

    Args: fixed: attributes of the layouts that are set.
    """
    fixed = {"rotate_method": "allgather", **(fixed or {})}
    rotate: Any = fixed["rotate_method"]
    samples = task == "sample"
    for context in _divisors(ranks):
        for ulysses in reversed(_divisors(context)):
            for cfg in (1, 2) if samples else (1,):
                data, rest = divmod(ranks, context * cfg)
                if rest or not data:
                    continue
                for sharded in (False, True) if (context if samples else ranks) > 1 else (False,):
                    for level in ("none",) if samples else LEVELS:
                        layout = Layout(data, cfg, context // ulysses, ulysses, sharded, level, rotate)
                        if all(getattr(layout, name) == value for name, value in fixed.items()):
                            yield layout


def shard_ranks(layout: Layout, task: Task) -> int:
    """Return over how many ranks the transformer's weights are sharded: sampling shards them over its context group."""
    if not layout.sharded:
        return 1
    return layout.ring * layout.ulysses if task == "sample" else layout.ranks


def check_fixed(fixed: Mapping[str, object], task: Task) -> None:
    """Check degrees that a user sets. Raises: ValueError: an unknown one, or one that the task does not have."""
    for name, value in fixed.items():
        if name not in _FIXED:
            raise ValueError(f"fixed.{name} cannot be planned: use one of {', '.join(_FIXED)}")
        if name == "rotate_method" and value not in ROTATE_METHODS:
            raise ValueError(f"fixed.rotate_method={value} must be one of {', '.join(ROTATE_METHODS)}")
        only = {"cfg": "sample", "checkpointing": "train"}.get(name, task)
        if only != task and value not in (1, "none"):
            raise ValueError(f"fixed.{name}={value} is for task={only}: leave it out of task={task}")


def problem_of(layout: Layout, model: PlannedModel) -> str | None:
    """Return why a model cannot use a layout, apart from memory; None if it can."""
    if layout.cfg > 1 and not model.guided:
        return "cfg=2 needs classifier-free guidance, which this model does not use"
    if model.heads is not None and layout.ulysses > model.heads:
        return f"ulysses={layout.ulysses} must be at most the number of heads, {model.heads}"
    if model.tokens is not None and layout.ring * layout.ulysses > model.tokens:
        return f"ring × ulysses = {layout.ring * layout.ulysses} must be at most the number of tokens, {model.tokens}"
    return None


def overrides_of(layout: Layout, task: Task, batch_size: int = 1) -> list[str]:
    """Return the settings of lightning-cp train or lightning-cp sample for a layout.

    Args: batch_size: samples of a rank's step; the recipe's is that of all data ranks.
    """
    if layout.ranks == 1:
        settings = ["strategy=single"]
    else:
        sharded_training = layout.sharded and task == "train"
        settings = [f"strategy={'cp_fsdp' if sharded_training else 'cp'}"]
        settings += [f"ring={layout.ring}", f"ulysses={layout.ulysses}", f"data_parallel={layout.data}"]
        settings += [f"rotate_method={layout.rotate_method}"] if layout.rotate_method != "allgather" else []
    if task == "train":
        return [*settings, f"batch_size={batch_size * layout.data}", f"activation_checkpointing={layout.checkpointing}"]
    settings += [f"cfg={layout.cfg}"] if layout.cfg > 1 else []
    return [*settings, *(["shard=[transformer]"] if layout.sharded else [])]


def simplicity(layout: Layout) -> tuple[int, ...]:
    """Return a key that sorts simpler layouts first.

    Fewer kinds of parallelism, replicated, less recomputation, smaller context degrees, Ulysses before ring.
    """
    degrees = sum(degree > 1 for degree in (layout.cfg, layout.ring, layout.ulysses))
    return degrees, layout.sharded, LEVELS.index(layout.checkpointing), layout.ring * layout.ulysses, layout.ring


def described(layout: Layout) -> str:
    """Return a layout as a text for tables, for example "data 2 × ulysses 4, sharded, full"."""
    degrees = " × ".join(f"{name} {getattr(layout, name)}" for name in _DEGREES if getattr(layout, name) > 1)
    if layout.columns > 1:
        degrees = degrees.replace(f"ring {layout.ring}", f"grid {layout.ring // layout.columns} × {layout.columns}")
    checkpointing = "" if layout.checkpointing == "none" else f", {layout.checkpointing} checkpointing"
    return f"{degrees or 'one rank'}{', sharded' if layout.sharded else ''}{checkpointing}"


def _divisors(number: int) -> list[int]:
    return [x for x in range(1, number + 1) if number % x == 0]
