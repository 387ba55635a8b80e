"""Decisions of diffusers' caches that depend on tensors, taken for all ranks that share a sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_cp.comm.transfer import all_gather_floats
from lightning_cp.compat.compiler_options import uncompiled
from lightning_cp.engine.caches.watched import WatchedHook
from lightning_cp.engine.session import Session
from lightning_cp.errors import ShapeError
from lightning_cp.undoable import Undo, set_attribute


def sums_over_ranks(session: Session, *values: Tensor) -> list[float]:
    """Sum scalars over all ranks that share the sample, in rank order, so that every rank gets the same bits.

    Ranks: all of `session.batch_group`. Synchronises the host.
    """
    local, group = torch.stack([x.double() for x in values]).tolist(), session.batch_group
    by_rank = [local] if group is None else all_gather_floats(local, group=group)
    return [sum(column) for column in zip(*by_rank, strict=True)]


def ratio(numerator: float, denominator: float) -> float:
    """Divide as tensors do: x / 0 is inf, 0 / 0 is NaN."""
    return float(torch.tensor(numerator, dtype=torch.float64) / torch.tensor(denominator, dtype=torch.float64))


def _sum_of_magnitudes(x: Tensor) -> Tensor:
    return x.abs().sum(dtype=torch.promote_types(x.dtype, torch.float32))


def _first_block(watched: WatchedHook) -> Undo:
    """Compare the first block's residual with the previous step's, over the tokens and samples of all ranks.

    diffusers divides the mean of |change| by the mean of |previous|: the number of elements cancels, so sums are
    enough. A tensor that is whole on each rank is counted once for each rank in both sums, which also cancels.
    """
    hook = watched.hook

    def should_compute(residual: Tensor) -> bool:
        state = hook.state_manager.get_state()
        previous = state.head_block_residual
        if previous is None:
            return True
        watched.check_lengths()
        if state.tail_block_residuals is None:  # a forward ended between the first block and the last
            return True
        change, size = sums_over_ranks(
            watched.session, _sum_of_magnitudes(residual - previous), _sum_of_magnitudes(previous)
        )
        return ratio(change, size) > float(hook.threshold)

    return set_attribute(hook, "_should_compute_remaining_blocks", uncompiled(should_compute))


def _mag_calibration(watched: WatchedHook) -> Undo:
    """Average the growth of the residual over all tokens: sum and count over ranks, never an average of averages."""
    eps = 1e-8  # as in diffusers

    def calibrate(state: Any, residual: Tensor) -> None:
        mean = 1.0
        if state.previous_residual is not None:
            watched.check_lengths()
            dtype = torch.promote_types(residual.dtype, torch.float32)
            now, before = (torch.linalg.norm(x.to(dtype), dim=-1) for x in (residual, state.previous_residual))
            growth = now / (before + eps)
            total, count = sums_over_ranks(watched.session, growth.sum(), growth.new_tensor(growth.numel()))
            mean = ratio(total, count)
        state.calibration_ratios.append(mean)

    return set_attribute(watched.hook, "_perform_calibration_step", calibrate)


def _mag_skip(watched: WatchedHook) -> Undo:
    """Raise where diffusers logs a warning and continues without the residual: its shape does not fit."""
    hook, run = watched.hook, watched.run

    def checked(*args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        metadata = hook._metadata
        block_input = metadata._get_parameter_from_args_kwargs(metadata.hidden_states_argument_name, args, kwargs)
        block_output = output[metadata.return_hidden_states_index] if isinstance(output, tuple) else output
        state = hook.state_manager.get_state()
        if not state.should_compute and block_output is block_input:
            raise ShapeError(
                f"MagCache cannot add its residual, of shape {tuple(state.previous_residual.shape)}, to the first "
                f"block's input, of shape {tuple(block_input.shape)}: use another cache"
            )
        return output

    return set_attribute(watched, "run", checked)


def _sea_gate(watched: WatchedHook) -> Undo:
    """Decide for all ranks by the first rank's distance; compute on all of them if one rank must compute."""
    shared = watched.hook.shared_state
    local_decision: Callable[..., bool] = partial(type(shared).resolve_gate, shared)

    def resolve(state: Any, metadata: Any, indicator: Any, config: Any) -> bool:
        if not watched.fits:
            state.history = []  # with an empty history, diffusers computes
        should_compute = local_decision(state, metadata, indicator, config)
        group = watched.session.batch_group
        if group is None:
            return should_compute
        votes = all_gather_floats([should_compute, state.accumulated_distance], group=group)
        computes = any(vote for vote, _ in votes)
        state.gate_should_compute, state.accumulated_distance = computes, 0.0 if computes else votes[0][1]
        return computes

    return set_attribute(shared, "resolve_gate", uncompiled(resolve))


def _text_key(watched: WatchedHook) -> Undo:
    """Recognise a text by its content. diffusers uses its address in memory, which a later text can get too."""
    texts: list[Tensor] = []

    def set_key(kwargs: dict[str, Any]) -> None:
        text = kwargs.get("encoder_hidden_states")
        if text is None:
            return
        known = (i for i, x in enumerate(texts) if x.shape == text.shape and torch.equal(x, text))
        key = next(known, len(texts))
        if key == len(texts):
            texts.append(text.clone())
        watched.hook.state_manager.get_state().key = key

    watched.before_compute, watched.forget_more = set_key, texts.clear

    def undo() -> None:
        watched.before_compute = watched.forget_more = None

    return undo


# By class name of the hook. Hooks that are not here decide by steps, or follow the decision of another hook.
DECISIONS: dict[str, Callable[[WatchedHook], Undo]] = {
    "FBCHeadBlockHook": _first_block,
    "MagCacheBlockHook": _mag_calibration,
    "MagCacheHeadHook": _mag_skip,
    "SeaCacheLeaderBlockHook": _sea_gate,
    "SeaCacheRootHook": _sea_gate,
    "TextKVCacheTransformerHook": _text_key,
}
