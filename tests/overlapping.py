"""Run a model in one process as PipeFusion runs it in two stages, to check what its plan says."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cp.engine.installed import Installed
from lightning_cp.engine.paths import submodule
from lightning_cp.nest import of_type, replace
from lightning_cp.pipelines.pipefusion.patches import PatchEvaluation, run_once
from lightning_cp.pipelines.pipefusion.stages import blocks_of
from lightning_cp.pipelines.pipefusion.transfers import parts_of_patches
from lightning_cp.pipelines.samples import main_argument
from lightning_cp.undoable import intercept_calls, undo_all


def outputs_in_patches(
    installed: Installed, args: Sequence[Any], kwargs: Mapping[str, Any], *, overlaps: bool, patches: int = 2
) -> dict[str, list[Tensor]]:
    """Evaluate a model whole, and then in patches with the same arguments, which must not change its outputs.

    Args:
        args, kwargs: arguments of the model's forward.
        overlaps: also evaluate the patches of steps that overlap, with other values in place of the latents that a
            stage does not know then: the first stage knows this patch and earlier ones, the second stage none.
    Returns: the floating-point outputs in patches, by what the stage knows.
    Raises: any exception of a forward in patches.
    """
    plan, model = installed.model_plan.patches, installed.module
    assert plan is not None, "the caller checks it"
    blocks = [submodule(model, path) for path in blocks_of(installed)]
    evaluation, sent, stage = PatchEvaluation.of(installed.session, patches), dict[int | None, Any](), 0
    latents = main_argument(model, tuple(args), dict(kwargs))

    def send(call: Any, args: Any, kwargs: Any) -> Any:
        """Run the first stage's last block. On the second stage, return what it returned with all latents."""
        output = call(*args, **kwargs)
        if not stage:
            sent[evaluation.patch] = output
        return sent[evaluation.patch] if stage == 2 else output

    def run(patch: int | None, known: Any) -> list[Tensor]:
        evaluation.begin(patch)
        given = {name: known if x is latents else x for name, x in kwargs.items()}
        result = model(*copy.deepcopy([known if x is latents else x for x in args]), **copy.deepcopy(given))
        return [x for x in of_type(Tensor, result) if x.is_floating_point()]

    undo = [*run_once(installed), intercept_calls(blocks[len(blocks) // 2 - 1], send)]
    try:
        with installed.session.evaluating(evaluation), torch.no_grad():
            run(None, latents)
            by_patch = [run(patch, latents) for patch in range(patches)]
            found = {"all latents": by_patch[-1]}
            parts = parts_of_patches([[~x.isnan() for x in tensors] for tensors in by_patch])
            if parts is None or not overlaps:
                return found
            numbers = [part.view(x.shape).to(x.device) for part, x in zip(parts, by_patch[-1], strict=True)]
            for stage in (1, 2) if plan.stages and len(sent) > patches else (1,):
                outputs = [torch.zeros_like(x) for x in by_patch[-1]]
                for patch in range(patches):
                    known = _only(latents, numbers, patch if stage == 1 else -1)
                    for x, output, number in zip(outputs, run(patch, known), numbers, strict=True):
                        x.copy_(torch.where(number == patch, output, x))
                found["earlier patches" if stage == 1 else "no latents"] = outputs
            return found
    finally:
        undo_all(undo)


def _only(latents: Any, numbers: Sequence[Tensor], patch: int) -> Any:
    """Replace the latents of patches after `patch`.

    Args: numbers: the patch of each element of the outputs. Latents of a shape that differs in more than the number of
        channels stay: steps do not overlap then.
    """
    remaining = iter(numbers)

    def hidden(x: Tensor) -> Tensor:
        number = next(remaining, None)
        if number is None or number.ndim != x.ndim:
            return x
        others = [dim for dim, size in enumerate(x.shape) if size != number.shape[dim]]
        if len(others) > 1:
            return x
        return torch.where((number.amin(others, keepdim=True) if others else number) > patch, 1 - 2 * x, x)

    return replace(Tensor, hidden, latents)
