"""Record one step of a parallel model: forward, and in training backward and the optimizer's step.

The optimizer's step depends on the forms of the weights only, so it is recorded once for equal weights.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cp.comm.transfer import observing
from lightning_cp.compat.torch_names import in_backward, is_fake
from lightning_cp.device_profile import device_type
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.nest import of_type
from lightning_cp.planning.data_parallel import GradientBuckets, count_sharded_gradients, local_weight
from lightning_cp.planning.recorder import WEIGHTS, WORLD, Recorder, Segment
from lightning_cp.planning.step import CATEGORIES, Layout, Part, Step

OPTIMIZER = "optimizer"  # name of the optimizer's part


@dataclass(frozen=True)
class Form:
    """The form of a weight. Attributes: storage_bytes: with the padding of a shard."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage_bytes: int

    @classmethod
    def of(cls, x: Tensor) -> Form:
        """Return the form of a tensor."""
        return cls(tuple(x.shape), x.stride(), x.dtype, x.untyped_storage().nbytes())

    def make(self) -> nn.Parameter:
        """Return a weight of this form."""
        storage = torch.empty(self.storage_bytes // self.dtype.itemsize, dtype=self.dtype)
        return nn.Parameter(storage.as_strided(self.shape, self.stride))


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make AdamW, with its default for the device: on a GPU it computes all weights at once."""
    return torch.optim.AdamW(parameters, foreach=device_type(parameters[0]) == "cuda")


@lru_cache(maxsize=8)
def optimizer_step(forms: tuple[Form, ...], *, kind: str, fake: bool) -> tuple[int, Segment]:
    """Record a step of AdamW on weights of these forms, in which gradients are freed.

    Args: kind: kind of the device. fake: the weights have no storage.
    Returns: bytes of its state, and its events and changes of memory.
    """
    weights = [form.make() for form in forms]
    optimizer = adamw(weights)
    with Recorder({}):  # its state exists after the first step
        for x in weights:
            x.grad = torch.empty_like(x)
        optimizer.step()
    recorder = Recorder({})
    _count(recorder, weights, "weights")
    _count(recorder, optimizer.state, "optimizer")
    _count(recorder, [x.grad for x in weights], "gradients")
    recorder.mark(OPTIMIZER)
    with recorder:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    recorder.mark("end")  # memory that is freed later does not count
    state_bytes = sum(x.untyped_storage().nbytes() for x in of_type(Tensor, optimizer.state))
    return state_bytes, recorder.segments[-2]


def _count(recorder: Recorder, value: object, category: str) -> None:
    for x in of_type(Tensor, value):
        recorder.tracker.add(x, category)


def training_loss(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Return the loss of a model, with the tensors that an objective of fine-tuning has.

    The first floating-point input holds the latents. As in `Objective.sample_losses`, every rank has the whole latents,
    noise, noisy latents and target in float32.
    """
    target, inputs = None, dict(inputs)
    name = next((name for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()), None)
    if name is not None:
        noisy, target = _noised(inputs[name].float())
        inputs[name] = noisy.to(inputs[name].dtype)
    output = next(of_type(Tensor, model(**inputs)))
    if target is None or target.shape != output.shape:
        target = torch.zeros(output.shape, device=output.device)
    return (output.to(target.dtype) - target).square().mean()


def _noised(clean: Tensor) -> tuple[Tensor, Tensor]:
    """Return noisy latents and the target of flow matching."""
    noise = torch.randn_like(clean)
    return clean + noise, noise - clean


@dataclass(frozen=True)
class StepSettings:
    """What a step is.

    Attributes:
        task: "train": forward, backward and the optimizer's step. "sample": a forward without gradients.
        autocast: dtype of `torch.autocast`; None: none.
    """

    task: Literal["train", "sample"] = "train"
    autocast: torch.dtype | None = None


TRAINING = StepSettings()


def record_step(
    model: nn.Module,
    inputs: Mapping[str, Any],
    layout: Layout,
    groups: MeshGroups,
    settings: StepSettings,
    *,
    weights: Sequence[nn.Parameter],
    repeats: Mapping[nn.Module, int],
) -> Step:
    """Run a step and record it, on tensors with or without storage.

    Args:
        model: parallel model.
        groups: its groups.
        weights: all weights. One that is in the list several times has copies, in blocks that were removed.
        repeats: how often each block counts, in the order of the forward.
    """
    local = {x: local_weight(x) for x in dict.fromkeys(weights)}
    trained = [local[x] for x in weights if x.requires_grad and settings.task == "train"]
    state_bytes, of_optimizer = 0, []
    if trained:
        kind, fake = device_type(trained[0]), is_fake(trained[0])
        state_bytes, segment = optimizer_step(tuple(map(Form.of, trained)), kind=kind, fake=fake)
        of_optimizer = [segment]
    gc.collect()  # cycles with tensors would be freed in the middle of the step
    recorder = Recorder(links_of(groups))
    recorder.weights_link = WORLD if settings.task == "train" else WEIGHTS
    for x in (*local.values(), *model.buffers()):
        recorder.tracker.add(x, "weights")
    copies = (Counter(weights) - Counter(local.keys())).items()
    recorder.tracker.reserve("weights", sum(local[x].untyped_storage().nbytes() * count for x, count in copies))
    recorder.tracker.reserve("optimizer", state_bytes)
    for x in of_type(Tensor, inputs):
        recorder.tracker.add(x, "activations")
    buckets = GradientBuckets(recorder, trained, 1 if layout.sharded else layout.ranks)
    if layout.sharded:
        recorder.at_mark = partial(count_sharded_gradients, recorder, list(model.parameters()))
    marks = _Marks(recorder, list(repeats))
    try:
        with observing(recorder), recorder:
            _run(model, inputs, settings, recorder, buckets)
    finally:
        buckets.remove()
        marks.remove()
    counts = {marks.name(block): count for block, count in repeats.items()}
    recorder.mark("end")
    return composed(layout, [*recorder.segments, *of_optimizer], counts)


def _run(
    model: nn.Module, inputs: Mapping[str, Any], settings: StepSettings, recorder: Recorder, buckets: GradientBuckets
) -> None:
    autocast: AbstractContextManager[Any] = nullcontext()
    if settings.autocast is not None:
        autocast = torch.autocast("cpu", settings.autocast)
    if settings.task == "sample":
        with torch.no_grad(), autocast:
            model(**inputs)
        return
    with autocast:
        loss = training_loss(model, inputs)
    recorder.mark("backward")
    loss.backward()  # type: ignore[no-untyped-call]
    buckets.finish()


def links_of(groups: MeshGroups) -> dict[dist.ProcessGroup, str]:
    """Return the names of communicators; of groups with several names the first."""
    links: dict[dist.ProcessGroup, str] = {}
    for name in ("ring", "ulysses", "context", "row", "column"):
        if (group := getattr(groups, name)) is not None:
            links.setdefault(group, name)
    return links


class _Marks:
    """Begin a segment where a block's forward begins, and where its backward does."""

    def __init__(self, recorder: Recorder, blocks: Sequence[nn.Module]) -> None:
        self._recorder, self._names = recorder, {block: f"block {i}" for i, block in enumerate(blocks)}
        self._hooks = [block.register_forward_pre_hook(self._before, prepend=True) for block in blocks]
        self._hooks += [block.register_forward_hook(self._after) for block in blocks]

    def name(self, block: nn.Module) -> str:
        """Return the name of the segments of a block; those of its backward have one more word."""
        return self._names[block]

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, block: nn.Module, _: object) -> None:
        if not in_backward():  # otherwise checkpointing computes it again
            self._recorder.mark(self._names[block])

    def _after(self, block: nn.Module, _: object, output: Any) -> None:
        if in_backward():
            return
        name, is_first = f"{self._names[block]} backward", [True]

        def begin(_: Tensor) -> None:
            if is_first.pop() if is_first else False:
                self._recorder.mark(name)

        for x in of_type(Tensor, output):
            if x.requires_grad:
                x.register_hook(begin)  # type: ignore[no-untyped-call]


def composed(layout: Layout, segments: Sequence[Segment], counts: Mapping[str, int]) -> Step:
    """Join the segments of a step. Args: counts: how often those of each block are repeated."""
    total, peak = dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0)
    parts, calls, at = [], 0, ""
    for segment in segments:
        repeats = counts.get(segment.name.removesuffix(" backward"), 1)
        for _ in range(repeats):
            highest = {name: total[name] + segment.span.peak[name] for name in CATEGORIES}
            if sum(highest.values()) > sum(peak.values()):
                peak, at = highest, segment.name
            total = {name: total[name] + segment.span.grown[name] for name in CATEGORIES}
        parts.append(Part(segment.name, tuple(segment.events), repeats))
        calls += segment.calls * repeats
    return Step(layout, tuple(parts), peak, calls, at)
