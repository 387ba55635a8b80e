"""Results of the last stage for all stages: lazy tensors, so that the next call can start before they arrive."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.errors import CallFailedError
from lightning_cp.mesh import MeshGroups
from lightning_cp.pipelines.block_stages import BlockStage
from lightning_cp.pipelines.forms import Form, form_and_tensors
from lightning_cp.pipelines.lazy_tensor import PendingGathers, resolve_all
from lightning_cp.pipelines.stage_links import check_same
from lightning_cp.pipelines.votes import Votes


@dataclass(eq=False)
class StageResults:
    """Sends the results of the last stage of a pipeline's transformers to all stages.

    Attributes:
        groups: the ranks that hold the stages, as a ring, in order.
        votes: the pipeline's votes, through which a stage's error reaches the others.
        is_lazy: False: results are exchanged at once.
        pending: results that are not exchanged yet.
    """

    groups: MeshGroups
    votes: Votes
    is_lazy: bool
    pending: PendingGathers = field(init=False)
    _forms: dict[Hashable, Form] = field(default_factory=dict)
    _stages: list[BlockStage] = field(default_factory=list)
    _marks: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending = PendingGathers(self.groups, self._after_exchange)
        if self.is_lazy:  # else no vote: the exchange is inside a transformer call, which other CFG ranks may not make
            self.pending.before_flush, self.votes.has_pending = self.votes.check, self.has_pending

    def has_pending(self) -> bool:
        """Return True if there are results that are not exchanged yet."""
        return bool(self.pending.results)

    def broadcast(self, stage: BlockStage, result: Any, key: Hashable) -> Any:
        """Return the result of the last stage, as lazy tensors. Ranks: all stages.

        Raises: the error of this stage. CallFailedError: another stage has failed.
        """
        self._stages.append(stage)
        last, key = self.groups.context_size - 1, (id(stage), key)
        is_last, tensors = self.groups.context_rank == last, list[Tensor]()
        if key not in self._forms:
            found = form_and_tensors(result)[0] if is_last and stage.error is None else None
            form = _broadcast_object(found, last, stage.links.group)
            if form is None:
                self._raise_error()
            self._forms[key] = form
        form = self._forms[key]
        if is_last and stage.error is None:
            own_form, tensors = form_and_tensors(result)
            try:
                check_same(own_form.layout, form.layout)
            except Exception as error:
                stage.error = error
        if not is_last or stage.error is not None:
            tensors = form.empty()
        self._marks.append(torch.full((1,), int(stage.error is not None), dtype=torch.uint8, device=form.device))
        lazy = form.filled(self.pending.lazy_tensors([*tensors, self._marks[-1]], last)[:-1])
        return lazy if self.is_lazy else resolve_all(lazy)

    def reset(self) -> None:
        """Forget the results of a call of the pipeline, also if it failed."""
        self.pending.drop()
        for stage in self._stages:
            stage.reset()
        self._stages, self._marks = [], []

    def _after_exchange(self, calls: int) -> None:
        if any(int(mark) for mark in self._marks):
            self._raise_error()
        for stage in self._stages:
            stage.links.finish()
        self._stages, self._marks = [], []
        if self.is_lazy:
            self.votes.end_exchanges()

    def _raise_error(self) -> NoReturn:
        """Raise the error of this stage, or a CallFailedError if another stage has failed."""
        for stage in self._stages:
            if stage.error is not None and not stage.error_of_others:
                raise stage.error
        self.votes.check()  # raises the error of the other stage by name, inside a call of the pipeline
        raise CallFailedError("another stage of blocks has failed in this transformer call")


def _broadcast_object(value: Any, source: int, group: dist.ProcessGroup) -> Any:
    """Broadcast an object from one rank of the group."""
    held = [value]
    dist.broadcast_object_list(held, group=group, group_src=source)
    return held[0]
