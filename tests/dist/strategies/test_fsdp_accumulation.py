"""Sharded weights with `mp_policy`: micro-batches that use other weights, as in one process; no warning about views."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from typing_extensions import override

from lightning_cp.fabric import ContextParallelFSDPStrategy
from tests.dist.lightning_ranks import fabric_of, whole
from tests.harness import RankPool

INPUTS = (torch.arange(6.0).view(2, 3) / 6).repeat(3, 1, 1)
INPUTS += torch.arange(3.0)[:, None, None] / 2


class _Block(nn.Module):
    """A layer, one for some micro-batches, and one that is never used. It returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    @override
    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.always(x)
        return (x + self.sometimes(x) if both else x).tanh().view(2, 3)


class _Model(nn.Module):
    """Two blocks: the first uses its second layer in the last micro-batch only, the other in the second only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    @override
    def forward(self, x: Tensor, index: int) -> Tensor:
        out: Tensor = self.blocks[1](self.blocks[0](x, index == 2), index == 1)
        return out


def _accumulate(rank: int, world: int) -> tuple[dict[str, float], list[str]]:
    """Return the error of each gradient relative to one process in bfloat16, and the warnings about views."""
    expected: dict[str, Tensor] = {}
    reference = _Model().bfloat16()
    for index, x in enumerate(INPUTS):
        reference.zero_grad()
        reference(x.bfloat16(), index).float().square().sum().backward()
        for name, p in reference.named_parameters():
            if p.grad is not None:
                expected[name] = expected.get(name, 0) + p.grad.float()

    model = _Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fabric = fabric_of(rank, world, ContextParallelFSDPStrategy(ring=world, mp_policy=policy))
    wrapped = fabric.setup(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index, x in enumerate(INPUTS):
            with fabric.no_backward_sync(wrapped, enabled=index < 2):  # type: ignore[arg-type]
                fabric.backward(wrapped(x, index).float().square().sum())
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    errors = {name: float((x - expected[name]).norm() / expected[name].norm()) for name, x in found.items()}
    return errors, [str(one.message) for one in caught if "view tensor" in str(one.message)]


def test_micro_batches_that_use_other_weights_accumulate_as_in_one_process(run_ranks: RankPool) -> None:
    for errors, said in run_ranks(3, _accumulate, init=False):
        assert len(errors) == 8
        assert max(errors.values()) < 1e-5
        assert not said
