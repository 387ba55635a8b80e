"""Dry-run a call of a pipeline's component: an encoder, or the VAE's decode, which the ranks of a sample share."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.comm.buffers import BUFFERS
from lightning_cp.comm.observer import observing
from lightning_cp.compat.torch_names import fake_tensors
from lightning_cp.config import ContextParallelConfig
from lightning_cp.device_profile import DeviceProfile, assuming
from lightning_cp.mesh.groups import MeshGroups, groups_for
from lightning_cp.nest import of_type, replace
from lightning_cp.planning.dry_run import fake_rank, is_ours, new_garbage_only, replace_tensors, without_storage
from lightning_cp.planning.pipeline.components import Component
from lightning_cp.planning.recorder import Recorder
from lightning_cp.planning.recording import composed, links_of
from lightning_cp.planning.step import Layout, Step
from lightning_cp.vae import parallelize_vae


@dataclass
class ComponentRuns:
    """The dry runs of components, shared by the layouts with equally many ranks for a sample."""

    _steps: dict[Any, Step | str] = field(default_factory=dict)

    def run(self, component: Component, ranks: int, device: DeviceProfile, dtype: torch.dtype) -> Step | str:
        """Dry-run a call of a component on a rank.

        Returns: the reason in one line if the component cannot be traced. An error in our own code is raised.
        """
        ranks = ranks if component.stage == "decode" else 1
        key = component.name, ranks, device.kind, device.capability, dtype
        if key not in self._steps:
            try:
                self._steps[key] = dry_run_component(component, ranks, device=device, dtype=dtype)
            except Exception as error:
                if is_ours(error) and not isinstance(error, (ValueError, RuntimeError)):
                    raise
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                self._steps[key] = f"{component.name} ({type(component.module).__name__}) cannot be traced ({reason})"
        return self._steps[key]


def dry_run_component(
    component: Component, ranks: int, *, device: DeviceProfile, dtype: torch.dtype, rank: int | None = None
) -> Step:
    """Trace a call of a component.

    Args:
        ranks: number of ranks that share it.
        dtype: dtype of weights and inputs.
        rank: the rank that is traced; None: one that has neighbours on both sides, if there is one.
    """
    rank = (1 if ranks > 2 else 0) if rank is None else rank
    with fake_rank(ranks, rank), assuming(device), new_garbage_only():
        groups = groups_for(ContextParallelConfig(ring_degree=ranks))
        BUFFERS.forget()
        module = copy.deepcopy(component.module)
        replace_tensors(module, lambda x: x.to(dtype) if x.is_floating_point() else x, lambda x: x)
        try:
            with fake_tensors(allow_real=True):
                replace_tensors(module, without_storage, without_storage)
                given = dict(component.inputs or {})
                inputs = replace(Tensor, lambda x: without_storage(x.to(dtype)) if x.is_meta else x, given)
                return record_call(module, component.method, inputs, groups)
        finally:
            BUFFERS.forget()


def record_call(module: nn.Module, method: str, inputs: Mapping[str, Any], groups: MeshGroups) -> Step:
    """Run a call without gradients and record it, on tensors with or without storage.

    The result is gathered as if all ranks had as many rows as this one.

    Args: groups: groups of the ranks that share a sample; a VAE is divided over them if its class supports that.
    """
    if method == "decode":
        with suppress(ValueError):  # this class is decoded whole by each rank, as with vae=auto
            parallelize_vae(module, groups)
    recorder = Recorder(links_of(groups))
    for x in (*module.parameters(), *module.buffers()):
        recorder.tracker.add(x, "weights")
    for x in of_type(Tensor, {**inputs}):
        recorder.tracker.add(x, "activations")
    with observing(recorder), recorder, torch.no_grad():
        getattr(module, method)(**inputs)
    recorder.mark("end")
    return composed(Layout(ring=groups.context_size), recorder.segments, {})
