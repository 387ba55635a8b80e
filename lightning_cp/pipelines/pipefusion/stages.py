"""Divide a transformer's blocks over ranks: each rank computes one stage of them, for one patch after another.

Each stage runs the model's own forward. Blocks of earlier stages are replaced by placeholders: the last of them returns
the tensors that the previous stage sent, the others return zeros that take no memory. After the last block of its
stage a rank sends that block's outputs on, and ends the forward. Only the last stage computes the end of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn

from lightning_cp.comm.shards import shard_range
from lightning_cp.engine.installed import Installed
from lightning_cp.engine.meta import free_weights, freed_weights, load_deferred
from lightning_cp.engine.paths import submodule
from lightning_cp.engine.sharding.sharders import shard_arguments
from lightning_cp.errors import PlanError
from lightning_cp.mesh.sample_groups import StageGroup
from lightning_cp.pipelines.pipefusion.links import StageFailedError, StageLinks
from lightning_cp.pipelines.result_layout import Form, form_and_tensors
from lightning_cp.undoable import Undo, intercept_calls


def blocks_of(installed: Installed) -> list[str]:
    """Return the paths of a transformer's blocks, in the order of its forward."""
    lists = [rule.paths for rule in installed.model_plan.arguments if rule.is_block]
    plan = installed.model_plan.patches
    if plan is not None and plan.alternate:
        return [path for paths in zip(*lists, strict=True) for path in paths]
    return [path for paths in lists for path in paths]


class _StageDone(BaseException):
    """Ends a forward after the last block of this rank's stage. `except Exception` in model code does not catch it."""


@dataclass(eq=False)
class BlockStage:
    """One rank's stage of a transformer's blocks.

    Attributes:
        links: links to the previous and the next stage.
        blocks: all blocks of the transformer.
        range: indices of this stage's blocks.
        key: identifies the shapes of the current forward; the same on all stages.
        error: the first error of this stage since `reset`; the following forwards only pass it on.
    """

    installed: Installed
    links: StageLinks
    blocks: list[nn.Module]
    range: range
    key: Hashable = None
    error: Exception | None = None
    _outputs: list[Form] = field(default_factory=list)
    _received: list[Any] | None = None
    _is_sent: bool = False

    @property
    def is_first(self) -> bool:
        """True for the stage with the first block."""
        return self.range.start == 0

    @property
    def is_last(self) -> bool:
        """True for the stage with the last block."""
        return self.range.stop == len(self.blocks)

    @property
    def count(self) -> int:
        """Number of stages."""
        return self.links.stages.num_stages

    @property
    def error_of_others(self) -> bool:
        """True if the error came from the previous stage."""
        return isinstance(self.error, StageFailedError)

    def install(self) -> list[Undo]:
        """Replace the blocks of earlier stages, and end forwards after the last block of this stage."""
        undo = [intercept_calls(self.blocks[i], partial(self._placeholder, i)) for i in range(self.range.start)]
        undo += [intercept_calls(self.blocks[i], partial(self._block, i)) for i in self.range]
        return undo + [intercept_calls(block, self._later_block) for block in self.blocks[self.range.stop :]]

    def reset(self) -> None:
        """Forget an error."""
        self.error = None

    def forward(self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable) -> Any:
        """Run this stage of one forward. An error is kept in `error`, and the other stages are notified.

        Returns: the model's result on the last stage; None on the others, and after an error.
        """
        self.key, self._outputs, self._received, self._is_sent = key, [], None, False
        try:
            if self.error is None:
                result = compute(*args, **kwargs)
                if self.is_last:
                    return result
                raise self._skipped()
        except _StageDone:
            self.installed.session.succeeded = True  # on this stage
            return None
        except Exception as error:
            self.error = error
        self._pass_on_failure()
        return None

    def _pass_on_failure(self) -> None:
        """Receive and send what the other stages expect of this forward."""
        if not self.is_first and self._received is None:
            with suppress(StageFailedError):
                self._receive()
        if not self.is_last and not self._is_sent:
            self.links.send_failure(self.key)

    def _placeholder(self, index: int, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what block `index` of an earlier stage would return: received tensors, or zeros."""
        shard_arguments(self.blocks[index], args, kwargs)  # they define the lengths of modalities
        return (self._receive() if self._received is None else self._received)[index]

    def _block(self, index: int, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block of this stage. After the last one, send its outputs and end the forward."""
        output = call(*args, **kwargs)
        if self.is_last:
            return output
        form, tensors = form_and_tensors(output)
        self._outputs.append(form)
        if index + 1 == self.range.stop:
            if len(self._outputs) != len(self.range):
                raise self._skipped()
            self.links.send(self.key, self._outputs, tensors)
            self._is_sent = True
            raise _StageDone
        return output

    def _later_block(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        raise self._skipped()

    def _skipped(self) -> PlanError:
        return PlanError(
            f"{type(self.installed.module).__name__} skips blocks in this call (skip-layer guidance, for example), so "
            "their outputs cannot be sent to the next stage: use pipe=1"
        )

    def _receive(self) -> list[Any]:
        self._received = []  # also if the previous stage has failed: there is nothing more to receive
        self._received = self.links.receive(self.key)
        return self._received


def make_stage(
    installed: Installed, stages: StageGroup, control: dist.ProcessGroup, counts: Sequence[int] | None = None
) -> BlockStage:
    """Divide the blocks of a transformer over the ranks of `stages`.

    Args:
        control: a gloo group that contains them.
        counts: number of blocks of each stage; None: equal. (All blocks of a model take about the same time, also those
            with separate weights for text and image, which have more parameters.)
    Raises: ValueError: more stages than blocks, or the counts do not fit.
    """
    model, num_stages, stage = installed.module, stages.num_stages, stages.stage
    name, paths = type(model).__name__, blocks_of(installed)
    blocks = [submodule(model, path) for path in paths]
    if len(blocks) < num_stages:
        raise ValueError(f"pipe={num_stages} must be at most the number of blocks of {name}, {len(blocks)}")
    if counts is None:
        range_of_stage = shard_range(len(blocks), num_stages, stage)
    else:
        if len(counts) != num_stages or min(counts) < 1 or sum(counts) != len(blocks):
            raise ValueError(
                f"pipe={list(counts)} must have one positive number of blocks for each of the {num_stages} stages, and "
                f"sum to the {len(blocks)} blocks of {name}"
            )
        start = sum(counts[:stage])
        range_of_stage = range(start, start + counts[stage])
    return BlockStage(installed, StageLinks(stages, control), blocks, range_of_stage)


def release_others(stage: BlockStage) -> None:
    """Free the weights of the blocks of other stages. The model can then no longer be saved on this rank.

    If the model was built without weights (`meta_transformer`), those of this stage are loaded.
    """
    for index, block in enumerate(stage.blocks):
        if index not in stage.range:
            free_weights(block)
    load_deferred(stage.installed.module)
    stage.installed.module.register_state_dict_pre_hook(_refuse_state)  # type: ignore[no-untyped-call]


def _refuse_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not freed_weights(module):
        return
    raise PlanError(
        f"{type(module).__name__} has only the blocks of this rank's stage (pipe > 1), so its weights cannot be saved: "
        "save the pipeline before parallelize_pipeline"
    )
