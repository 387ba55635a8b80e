"""Labels of pieces through operators: whether each piece of a call needs the same and earlier pieces only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cp.nest import of_type
from lightning_cp.pipelines.pipefusion.results import PieceLabels

_PIECES = torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int16).view(1, 6, 1).expand(2, 6, 3).contiguous()


class _Carry(TorchDispatchMode):
    """Carries labels through each operator that is no view, as deferred operators do."""

    def __init__(self, labels: PieceLabels) -> None:
        super().__init__()
        self.labels, self.kept = labels, list[Tensor]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if not func.is_view and any(True for _ in of_type(Tensor, (args, kwargs))):
            self.kept.append(result)
            self.labels.carry(result, partial(func, *args, **(kwargs or {})))
        return result


def _is_within(change: Callable[[Tensor], Tensor]) -> bool:
    labels, result = PieceLabels(), torch.randn(2, 6, 3)
    labels.put(result, _PIECES)
    with _Carry(labels):
        argument = change(result)
    return labels.are_within([argument], [_PIECES])


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul(0.5).add(x.neg()),
        lambda x: torch.randn(2, 6, 3) + 0.3 * x.double().float(),
        lambda x: torch.cat([torch.cat([x, x])[:2, :2], x[:, 2:]], dim=1),
        lambda x: torch.stack([x, x])[1],
        lambda x: x / x.norm(dim=-1, keepdim=True),
        lambda x: x.transpose(1, 2).clone().transpose(1, 2),
        lambda x: x[..., :2].repeat(1, 1, 2),
        lambda x: torch.bmm(x, torch.randn(2, 3, 3)),
        lambda x: x[:, :1].repeat(1, 6, 1),
        lambda x: torch.where(x > 0, x, torch.zeros(())),
    ],
)
def test_pieces_that_stay_apart_do_not_wait(change: Callable[[Tensor], Tensor]) -> None:
    assert _is_within(change)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.cat([x[:, 1:], x[:, :1]], dim=1),
        lambda x: x - x.mean(),
        lambda x: x / x.std(dim=[1, 2], keepdim=True),
        lambda x: x * (x > 0).float().mean(dim=1, keepdim=True),
        lambda x: x + x[:, -1:],
        lambda x: torch.bmm(torch.randn(2, 6, 6), x),
        lambda x: x.view(torch.int16),
        lambda x: x[:, 4:].repeat(1, 3, 1),
        lambda x: x[0],
    ],
)
def test_mixed_pieces_wait(change: Callable[[Tensor], Tensor]) -> None:
    assert not _is_within(change)


def test_results_without_pieces_wait_and_computed_ones_do_not() -> None:
    labels, result = PieceLabels(), torch.randn(2, 6, 3)
    labels.put(result, None)
    assert not labels.are_within([result], [_PIECES])
    labels.forget([result])
    assert labels.are_within([result, result], [_PIECES])
