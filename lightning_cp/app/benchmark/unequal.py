"""Workload `shares`: a sampling step with one slow rank, with equal shares and with shares proportional to speed.

The last rank computes its layers and attention kernels twice, so it is slower by the same factor on every machine.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn
from torch.nn import functional as F

from lightning_cp.app.benchmark.subject import Subject, modes
from lightning_cp.app.benchmark.workloads import model_arguments, one_process_subjects
from lightning_cp.engine.apply import parallelize
from lightning_cp.kernels import choose_kernel

_OPERATIONS = ("linear", "layer_norm", "rms_norm", "gelu", "silu")  # of torch.nn.functional


def shares(config: DictConfig, device: torch.device) -> list[Subject]:
    """List the subjects: one process on one thread at full speed, then each mode with equal and with unequal shares."""
    torch.manual_seed(0)
    with device:
        model: nn.Module = instantiate(config.model, _convert_="all").to(getattr(torch, config.dtype))
    arguments, world = model_arguments(config, device), dist.get_world_size()
    is_slow = dist.get_rank() == world - 1

    def step_of(parallel: Any, by_speed: list[int] | None) -> Callable[[], object]:
        copied = copy.deepcopy(model)
        if parallel is not None:
            parallelize(copied, parallel, shares=by_speed)

        @torch.inference_mode()
        def step() -> None:
            if parallel is not None and is_slow:
                with half_speed(arguments["hidden_states"]):
                    copied(**arguments)
            else:
                copied(**arguments)

        return step

    subjects = one_process_subjects(lambda: step_of(None, None), device)[:1]
    by_speed = [2] * (world - 1) + [1]
    for name, parallel in modes(world).items():
        subjects.append(Subject(f"{name}, equal shares", functools.partial(step_of, parallel, None)))
        shown = str(by_speed).replace(" ", "")
        subjects.append(Subject(f"{name}, shares={shown}", functools.partial(step_of, parallel, by_speed)))
    return subjects


@contextmanager
def half_speed(like: torch.Tensor) -> Iterator[None]:
    """Compute attention kernels and the operations of layers twice on this rank. Transfers are not repeated.

    Args: like: tensor of the dtype and on the device of the forward.
    """
    kernel: Any = type(choose_kernel("auto", like.new_empty(1, 1, 1, 64), None))
    with ExitStack() as stack:
        for owner, name in [(kernel, "forward"), *((F, name) for name in _OPERATIONS)]:
            stack.enter_context(mock.patch.object(owner, name, _twice(getattr(owner, name))))
        yield


def _twice(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        function(*args, **kwargs)
        return function(*args, **kwargs)

    return call
