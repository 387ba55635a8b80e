"""Watch one hook of a step cache: whether it computes the module (equally on all ranks), and what its state fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_cp.comm.transfer import all_gather_floats
from lightning_cp.compat.compiler import uncompiled
from lightning_cp.engine.caches.table import Cache
from lightning_cp.engine.hook_base import EngineHook
from lightning_cp.engine.session import Session
from lightning_cp.errors import ShapeError
from lightning_cp.undoable import Undo, set_attribute, undo_all

_Lengths = tuple[tuple[str, int], ...]  # global number of tokens of each modality


class WatchedHook(EngineHook):
    """A hook of diffusers' caches, with this object in the place of its `fn_ref`.

    The hook then runs the module's own forward through `original_forward`, so this object knows whether it did. A
    module that a cache skips makes no attention call, which the engine would otherwise report as an error.

    Attributes:
        hook: the hook of diffusers.
        cache: the cache that it belongs to.
        undo: functions that restore the hook's own decisions, to be called last to first.
        before_compute: called with the arguments before the module's own forward; None for most hooks.
        forget_more: called when the state is reset; None for most hooks.
        computed, skipped: number of calls in which the module's own forward ran, and did not.
    """

    def __init__(self, hook: Any, module: Any, cache: Cache, session: Session) -> None:
        self.hook, self.module, self.cache, self.session = hook, module, cache, session
        self.undo: list[Undo] = []
        self.before_compute: Callable[[dict[str, Any]], None] | None = None
        self.forget_more: Undo | None = None
        self._reference: Any = hook.fn_ref  # diffusers' object with the functions that the hooked forward calls
        self._run: Any = self._reference.forward
        self.computed = self.skipped = 0
        self._computed = False
        self._lengths: dict[str | None, _Lengths] = {}

    def install(self) -> None:
        """Take the place of the hook's `fn_ref`. Hooks that only change arguments or results are left alone."""
        if hasattr(self.hook, "new_forward"):
            self.hook.fn_ref, self._reference.forward = self, self.run

    def uninstall(self) -> None:
        """Undo `install`, and restore the hook's own decisions."""
        undo_all(self.undo)
        if self.hook.fn_ref is self:
            self.hook.fn_ref, self._reference.forward = self._reference, self._run

    @property
    def states(self) -> Any:
        """Return diffusers' `StateManager` of the hook; None if the hook keeps one state."""
        return getattr(self.hook, "state_manager", None)

    @property
    def context(self) -> str | None:
        """Return the name of the current `cache_context`; None if there is none, or if the state is not kept by it."""
        context = getattr(self.states, "_context", None)
        return None if context is None else context.name

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hook. Raises: ShapeError: it skipped the module, but its state has other numbers of tokens."""
        call = self.session.call
        if call is None:  # a hook around the whole model, outside of the engine's forward
            return self._run(*args, **kwargs)
        self._computed, name = False, self.context
        lengths = self.lengths
        try:
            output = self._run(*args, **kwargs)
        except (RuntimeError, ValueError):
            if not self._computed:
                self.check_lengths()  # the cause of an error about shapes; shards may fit on some ranks only
            raise
        if self._computed:
            self.computed += 1
            self._lengths[name] = lengths
        else:
            self.check_lengths()
            self.skipped += 1
            call.intercepted = True  # there was no attention that could have been intercepted
        return output

    def original_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward: the hook calls this."""
        self._computed = True
        if self.before_compute is not None:
            self.before_compute(kwargs)
        return self._reference.original_forward(*args, **kwargs)

    @property
    def lengths(self) -> _Lengths:
        """Return the global numbers of tokens in this forward."""
        return () if self.session.call is None else tuple(self.session.call.lengths.items())

    @property
    def fits(self) -> bool:
        """Return True if the state has the numbers of tokens of this forward; equal on all ranks."""
        return self._lengths.get(self.context, self.lengths) == self.lengths

    def check_lengths(self) -> None:
        """Check the token counts of the state. Raises: ShapeError, on every rank: they are those of another forward."""
        if not self.fits:
            before, now = dict(self._lengths[self.context]), dict(self.lengths)
            raise ShapeError(
                f"{self.cache.name} keeps results for {before} tokens, but this step has {now}: before a sample of "
                "another size, empty the cache on every rank (transformer._reset_stateful_cache())"
            )

    def reset(self) -> None:
        """Forget all steps. (diffusers' own reset also ends the `cache_context` under way.)"""
        self._lengths.clear()
        for states in self._managers():
            states._state_cache.clear()
        if hasattr(self.hook, "state"):
            self.hook.state.reset()
        if self.forget_more is not None:
            self.forget_more()

    def forget(self, name: str) -> None:
        """Forget the steps of one `cache_context`."""
        self._lengths.pop(name, None)
        for states in self._managers():
            states._state_cache.pop(name, None)

    def _managers(self) -> list[Any]:
        return [x for x in vars(self.hook).values() if hasattr(x, "_state_cache")]


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
