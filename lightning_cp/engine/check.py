"""`check_plan`: run a model in one process and context-parallel, and compare outputs and gradients."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_cp.comm.agree import gather_objects
from lightning_cp.config import context_config
from lightning_cp.engine.apply import apply_context_parallel
from lightning_cp.mesh.groups import MeshGroups, groups_for
from lightning_cp.nest import replace

_TOLERANCE = 1e-9
_FLOOR = 1e-3  # smallest scale of a relative error: avoids division by values close to zero
_NARROW = (torch.float16, torch.bfloat16, torch.float32)
_WIDE = {**dict.fromkeys(_NARROW, torch.float64), torch.complex64: torch.complex128}
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


@dataclass(frozen=True)
class Difference:
    """Error of one output, or of one parameter's gradient, against the run in one process.

    Attributes:
        name: path of the output, or name of the parameter.
        error: largest absolute difference, divided by the largest absolute reference value (at least 1e-3); infinite if
            the two cannot be compared.
        note: reason for an infinite error, or a remark that both are None; empty otherwise.
    """

    name: str
    error: float
    note: str = ""


@dataclass(frozen=True)
class PlanCheck:
    """Result of `check_plan`, the same on every rank."""

    outputs: tuple[Difference, ...]
    gradients: tuple[Difference, ...]
    tolerance: float

    @property
    def passed(self) -> bool:
        """True if no error is above `tolerance`."""
        return not self.differing

    @property
    def differing(self) -> list[Difference]:
        """All differences above `tolerance`, outputs first."""
        return self._above(self.outputs) + self._above(self.gradients)

    @property
    def output_error(self) -> float:
        """Largest error of all outputs."""
        return max((x.error for x in self.outputs), default=0.0)

    @property
    def gradient_error(self) -> float:
        """Largest error of all gradients."""
        return max((x.error for x in self.gradients), default=0.0)

    def __str__(self) -> str:
        lines, listed = [], []
        for kind, differences, largest in (
            ("output", self.outputs, self.output_error),
            ("gradient", self.gradients, self.gradient_error),
        ):
            above, count = self._above(differences), f"{len(differences)} {kind}{'s' if len(differences) != 1 else ''}"
            lines.append(f"{count}: largest error {largest:.1e}, {len(above)} above {self.tolerance:.0e}")
            worst = sorted(above, key=lambda x: -x.error)
            listed += [f"  {kind} {x.name}: {x.note or f'{x.error:.1e}'}" for x in worst]
        return "\n".join(lines + listed)

    def _above(self, differences: Sequence[Difference]) -> list[Difference]:
        return [x for x in differences if not x.error <= self.tolerance]


def check_plan(
    module: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    parallel_config: object,
    plan: object = None,
    *,
    tolerance: float = _TOLERANCE,
    training: bool = False,
    shares: Sequence[float] | None = None,
) -> PlanCheck:
    """Run forward and backward of `module` in one process and context-parallel, and compare the results.

    Runs a copy of the module with rank 0's weights, in float64: the model's casts to float32 or narrower become casts
    to float64. Parameters that are all zero get small random values in the copy: zeros would hide errors of the layers
    before them. Activation checkpointing is non-reentrant (`use_reentrant=False`).

    Args:
        module: model of any class; small, because every rank also runs it unsharded.
        inputs: arguments of the forward, by name or in order; the same on all ranks.
        parallel_config, plan, shares: see `apply_context_parallel`.
        tolerance: largest relative error that passes; see `Difference`.
        training: run in training mode, for models that compute something else there. The model must have no dropout:
            its random masks would differ.
    Returns: errors of all floating-point output tensors, and of the gradients of all parameters with `requires_grad`.
        The loss is a weighted sum of the outputs; gradients are averaged over the context group.
    Ranks: all of the context group.
    Raises: all errors of `apply_context_parallel`, and of the context-parallel model's forward and backward.
    """
    config = context_config(parallel_config)
    groups = groups_for(config, shares)
    model = _prepared(module, groups).train(training)
    alone = _run(model, inputs)
    apply_context_parallel(model, config, plan, shares=shares)
    outputs, gradients = _run(model, inputs)
    if groups.context is not None:
        average_in_place([x for x in gradients.values() if x is not None], groups.context)
    differences = (_compare(alone[0], outputs), _compare(alone[1], gradients))
    by_output, by_parameter = zip(*gather_objects(differences, groups.context), strict=True)
    return PlanCheck(_worst(by_output), _worst(by_parameter), tolerance)


def _prepared(module: nn.Module, groups: MeshGroups) -> nn.Module:
    model = copy.deepcopy(module).double()
    generator = torch.Generator().manual_seed(0)
    for inner in model.modules():
        if getattr(inner, "gradient_checkpointing", False):
            inner._gradient_checkpointing_func = _checkpoint  # type: ignore[assignment]
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
        if groups.context is not None:
            _broadcast([*model.parameters(), *model.buffers()], groups.context)
    return model


def _broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite the tensors with the first rank's, with one collective for each dtype and device."""
    for same in _by_type(tensors):
        flat = torch.cat([x.flatten() for x in same])
        dist.broadcast(flat, group_src=0, group=group)
        _write_back(flat, same)


def average_in_place(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Average the tensors over the group, in place, with one collective for each dtype and device."""
    for same in _by_type(tensors):
        flat = torch.cat([x.flatten() for x in same])
        dist.all_reduce(flat, group=group)
        _write_back(flat / dist.get_world_size(group), same)


def _by_type(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    types = dict.fromkeys((x.dtype, x.device) for x in tensors)
    for kind in types:
        yield [x for x in tensors if (x.dtype, x.device) == kind]


def _write_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for x, values in zip(tensors, torch.split(flat, [x.numel() for x in tensors]), strict=True):
        x.copy_(values.view_as(x))


def _run(
    model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any]
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Return all outputs by name, and each parameter's gradient of a weighted sum of the outputs."""
    model.zero_grad(set_to_none=True)
    with KeepFloat64():
        arguments = replace(Tensor, _widened, copy.deepcopy(inputs))
        result = model(**arguments) if isinstance(arguments, Mapping) else model(*arguments)
        outputs = {name: x for name, x in _tensors("", result) if x.is_floating_point()}
        generator, loss = torch.Generator().manual_seed(5), torch.zeros((), dtype=torch.float64)
        for x in outputs.values():
            weights = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
            loss = loss.to(x.device) + (x * weights).sum()
        loss.backward()  # type: ignore[no-untyped-call]
    return (
        {name: x.detach() for name, x in outputs.items()},
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters() if p.requires_grad},
    )


def _checkpoint(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a block, and enter the float64 mode again for its recomputation.

    Backward is itself a torch function, so the mode that is active around it is off inside it.
    """
    wide = (nullcontext(), KeepFloat64())
    return checkpoint(block, *args, use_reentrant=False, context_fn=lambda: wide, **kwargs)


class KeepFloat64(TorchFunctionMode):
    """Mode in which casts to float32 or a narrower dtype, written into a model's code, become casts to float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CASTS:
            return Tensor.double(*args, **(kwargs or {}))
        named = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*(_wide(value) for value in args), **named)


def _wide(value: object) -> object:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _widened(x: Tensor) -> Tensor:
    """Cast a floating-point tensor to float64, and a complex one to complex128."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64 if x.is_floating_point() else x.dtype)


def _tensors(prefix: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix or "output", value
    elif dataclasses.is_dataclass(value):
        for entry in dataclasses.fields(value):
            yield from _tensors(f"{prefix}.{entry.name}".lstrip("."), getattr(value, entry.name))
    elif isinstance(value, Mapping):
        for key, x in value.items():
            yield from _tensors(f"{prefix}.{key}".lstrip("."), x)
    elif isinstance(value, (list, tuple)):
        for i, x in enumerate(value):
            yield from _tensors(f"{prefix or 'output'}[{i}]", x)


def _compare(expected: dict[str, Tensor | None], parallel: dict[str, Tensor | None]) -> list[Difference]:
    differences = []
    for name in dict.fromkeys([*expected, *parallel]):
        reference, x = expected.get(name), parallel.get(name)
        if reference is None or x is None:
            if (reference is None) != (x is None):
                where = "in one process" if x is None else "context-parallel"
                differences.append(Difference(name, float("inf"), f"exists only {where}"))
            elif name in expected:
                differences.append(Difference(name, 0.0, "is None in both"))
        elif reference.shape != x.shape:
            note = f"has shape {tuple(x.shape)}, in one process {tuple(reference.shape)}"
            differences.append(Difference(name, float("inf"), note))
        elif not x.isfinite().all() or not reference.isfinite().all():
            differences.append(Difference(name, float("inf"), "is not finite everywhere"))
        elif x.numel():
            scale = max(float(reference.abs().max()), _FLOOR)
            differences.append(Difference(name, float((x - reference).abs().max()) / scale))
    return differences


def _worst(by_rank: Sequence[list[Difference]]) -> tuple[Difference, ...]:
    largest: dict[str, Difference] = {}
    for x in (x for differences in by_rank for x in differences):
        known = largest.get(x.name)
        if known is None or not x.error <= known.error:
            largest[x.name] = x
    return tuple(largest.values())
