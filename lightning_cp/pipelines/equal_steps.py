"""Compare samples of the latents between the steps of a pipeline call, and of its result, on all ranks of a sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lightning_cp.comm.background import BackgroundGather, gather_device, gather_in_background
from lightning_cp.engine.peers.samples import SAMPLES, Sampler, sampled_difference
from lightning_cp.errors import PeerMismatchError
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.nest import named_leaves
from lightning_cp.pipelines.calls import arguments_by_name
from lightning_cp.pipelines.error_votes import Votes

_NAMES = ("model_output", "timestep", "sample", "scheduler", "result")
_SCHEDULE = ("timesteps", "sigmas", "num_inference_steps", "_begin_index")  # equal when the first step begins


class EqualSteps:
    """Compares the arguments of the scheduler's steps and the result of each call of a pipeline.

    The first step is compared at once, the others in the background, while the next one is computed.

    Args:
        name: class name of the pipeline, for errors.
        sample: the ranks that share a sample.
        calls: number of calls to compare; None: all, 0: none.
        votes: ranks vote before a comparison that they wait for.
    """

    def __init__(self, name: str, sample: MeshGroups, votes: Votes, *, calls: int | None) -> None:
        self._name, self._sample, self._votes, self._calls = name, sample, votes, calls
        self._sampler = Sampler(_NAMES)
        self._step, self._compares_steps, self._every_step = 0, False, False
        self._pending: BackgroundGather | None = None

    def begin(self, *, resolved: bool, every_step: bool) -> None:
        """Begin a call.

        Args:
            resolved: the scheduler gets real tensors, not lazy ones, which steps would wait for.
            every_step: compare all steps; False: the first, because the arguments of all forwards are compared.
        """
        self._pending, self._step, self._every_step = None, 0, every_step
        self._compares_steps = resolved and self._is_on

    def compare_step(
        self, scheduler: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Wrap the scheduler's `step`. Ranks: all of the sample. Raises: PeerMismatchError: the step before differs."""
        if self._compares_steps and (self._every_step or not self._step):
            arguments = arguments_by_name(_signature(type(scheduler).step), args, kwargs)
            if self._step:
                self._compare(arguments)
            else:
                arguments["scheduler"] = [
                    type(scheduler).__qualname__,
                    *(getattr(scheduler, x, None) for x in _SCHEDULE),
                ]
                self._compare_now(arguments)
        return call(*args, **kwargs)

    def end(self, result: Any) -> None:
        """Compare a call's result. Ranks: all of the sample. Raises: PeerMismatchError: it or the last step differs."""
        if self._is_on:
            self._compare_now({"result": list(_samples(result))})
            self._calls = self._calls and self._calls - 1

    @property
    def _is_on(self) -> bool:
        return self._sample.context is not None and self._calls != 0

    def _compare_now(self, arguments: Mapping[str, Any]) -> None:
        with self._votes.before_exchanges():  # a rank may have raised
            self._compare(arguments)
            self._finish()

    def _compare(self, arguments: Mapping[str, Any]) -> None:
        self._finish()
        self._step += 1
        group = self._sample.context
        assert group is not None, "checked by _is_on"
        with torch.no_grad():
            table, _ = self._sampler.table(arguments, forward=self._step, device=gather_device(group))
        self._pending = gather_in_background(table.flatten(), group=group)

    def _finish(self) -> None:
        """Read the comparison in progress. Raises: PeerMismatchError: it has found a difference."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        difference = sampled_difference(pending.read(), _NAMES)
        if difference is not None:
            rank, problem = difference
            raise PeerMismatchError(
                f"ranks that share a sample must compute the same, but {problem} in step {self._step} of {self._name} "
                f"(rank {rank} of this group, compared with its rank 0; the result counts as a step): callbacks and "
                "components must be equal on these ranks"
            )


_signature = lru_cache(inspect.signature)


def _samples(result: Any) -> Iterator[Any]:
    """Yield some elements of each tensor, array and image of a result, rounded, because each rank may decode."""
    values = getattr(result, "values", None)  # of the PipelineState of a modular pipeline
    for _, leaf in named_leaves("", values if isinstance(values, dict) else result):
        x = np.asarray(leaf) if isinstance(leaf, Image.Image) else leaf
        if isinstance(x, np.ndarray):
            x = x.reshape(-1)[:: max(1, x.size // SAMPLES)]
            x = torch.from_numpy(x.astype(np.float32)) if x.dtype.kind in "uif" else None
        elif isinstance(x, Tensor):
            x = x.detach().reshape(-1)[:: max(1, x.numel() // SAMPLES)]
        if isinstance(x, Tensor):
            yield x.bfloat16() if not x.is_complex() else torch.view_as_real(x).bfloat16()
        elif isinstance(x, (bool, int, str)):
            yield x
