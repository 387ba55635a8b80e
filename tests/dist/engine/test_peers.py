"""Different data after the first forwards: detected in the next forward, on every rank, in any use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_cp import (
    ContextParallelConfig,
    ContextParallelInput,
    ContextParallelOutput,
    apply_context_parallel,
    remove_context_parallel,
)
from lightning_cp.engine.apply import installed_on
from lightning_cp.engine.peers.comparison import PeerCheck
from lightning_cp.errors import PeerMismatchError
from lightning_cp.mesh.groups import groups_for
from tests.dist.plain import PLAIN_PLAN, Plain
from tests.harness import RankPool
from tests.models.wan import wan

pytestmark = pytest.mark.filterwarnings("ignore")

Arguments = dict[str, Any]


def _same(given: Arguments) -> None:
    pass


def _noise(given: Arguments) -> None:
    given["hidden_states"] = given["hidden_states"] + torch.randn(given["hidden_states"].shape)


def _row(given: Arguments) -> None:
    given["encoder_hidden_states"] = given["encoder_hidden_states"].clone()
    given["encoder_hidden_states"][1, 6] *= -1


def _step(given: Arguments) -> None:
    given["timestep"] = given["timestep"] + 1


def _number(given: Arguments) -> None:
    given["attention_kwargs"] = {"scale": 2.0}


def _rounding(given: Arguments) -> None:
    given["hidden_states"] = given["hidden_states"] * (1 + 1e-4)


CHANGES: dict[str, Callable[[Arguments], None]] = {
    "hidden_states": _noise,
    "encoder_hidden_states": _row,
    "timestep": _step,
    "attention_kwargs": _number,
    "": _rounding,
}


def _divergent(rank: int, world: int) -> list[tuple[int, str]]:
    """Forwards in which an error was raised: 4 without a change, then 4 for each change, which is in their third."""
    torch.manual_seed(rank)
    model = wan().build().float()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    raised = []
    forward = 0
    for change in (_same, *CHANGES.values()):
        for turn in range(4):
            given: Arguments = {
                name: x.float() if x.is_floating_point() else x for name, x in wan().arguments().items()
            }
            given["attention_kwargs"] = {"scale": 1.0}
            if turn == 2 and rank == world - 1:
                change(given)
            try:
                model(**given, return_dict=False)[0].square().mean().backward()
            except PeerMismatchError as error:
                raised.append((forward, str(error)))
            forward += 1
    return raised


def test_divergence_is_raised_in_the_next_forward_on_every_rank(run_ranks: RankPool) -> None:
    for raised in run_ranks(3, _divergent):
        assert [forward for forward, _ in raised] == [7, 11, 15, 19]
        for (forward, message), name in zip(raised, CHANGES, strict=False):
            counted = forward - (forward // 4 - 1)  # those that raised have not run; counted from 1
            assert f"contents of {name} differ in forward {counted} of WanTransformer3DModel" in message
            assert "rank 2 of the context group against rank 0" in message
            assert "strategy.generator(seed)" in message


def _input(change: float = 0.0, tokens: int = 10) -> Tensor:
    return torch.randn(1, tokens, 16, generator=torch.Generator().manual_seed(tokens)) + change


def _plain() -> Plain:
    model = Plain()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=dist.get_world_size()), PLAIN_PLAN)
    return model


def _uses(use: str, rank: int) -> str:
    """Return the error for a divergence in the fourth call, in one way to use a model."""
    torch.manual_seed(0)
    model, bystander = _plain(), _plain()
    call: Callable[[Tensor], Any] = model
    if use == "reentrant" or use == "replayed":

        def call(x: Tensor) -> None:
            x = x.requires_grad_()
            checkpoint(lambda x: model(x)[0], x, use_reentrant=use == "reentrant").sum().backward()

    elif use == "copied":
        call = copy.deepcopy(model)
    elif use == "inference":

        def call(x: Tensor) -> None:
            with torch.inference_mode():
                model(x)

    elif use == "compiled blocks":
        model.requires_grad_(False)
        for block in model.blocks:
            block.compile(backend="eager")

    elif use == "mixed modes":
        count = iter(range(9))

        def call(x: Tensor) -> None:
            with torch.inference_mode(next(count) % 2 == 0), torch.autocast("cpu", torch.bfloat16):
                model(x)

    elif use == "default device and type":

        def call(x: Tensor) -> None:
            with torch.device("meta"):
                torch.set_default_dtype(torch.float16)
                try:
                    model(x)
                finally:
                    torch.set_default_dtype(torch.float32)

    for _ in range(3):
        call(_input())
        bystander(_input())
    if use in ("reentrant", "replayed"):
        with pytest.raises(PeerMismatchError) as caught:
            call(_input(float(rank)))  # raised in its replay
        return str(caught.value)
    call(_input(float(rank)))
    bystander(_input())
    with pytest.raises(PeerMismatchError) as caught:
        call(_input())
    call(_input())
    bystander(_input())
    return str(caught.value)


USES = (
    *("plain", "reentrant", "replayed", "copied", "inference", "mixed modes", "compiled blocks"),
    "default device and type",
)


def _all_uses(rank: int, world: int) -> list[str]:
    return [_uses(use, rank) for use in USES]


def test_divergence_is_found_however_a_model_is_used(run_ranks: RankPool) -> None:
    for messages in run_ranks(2, _all_uses):
        for use, message in zip(USES, messages, strict=True):
            forward = 7 if use in ("reentrant", "replayed") else 4  # each of their calls is two forwards
            assert f"contents of x differ in forward {forward} of Plain" in message, use


def _transformed(rank: int, world: int) -> list[str]:
    """Arguments under torch.func's transformations and forward AD, which must come out as plain numbers."""
    found = []

    def one(transformed: Callable[[Callable[[Tensor], Tensor], Tensor], object]) -> None:
        check = PeerCheck(groups_for(ContextParallelConfig(ring_degree=world)), ["x"], "sampled")

        def forward(x: Tensor) -> Tensor:
            check.check({"x": x}, model="M")
            check.start()
            return x * 2

        for change in (0, 0, 0, rank, 0):
            try:
                transformed(forward, _input(float(change)))
            except PeerMismatchError as error:
                found.append(str(error))

    def dual(f: Callable[[Tensor], Tensor], x: Tensor) -> None:
        with forward_ad.dual_level():
            out = f(forward_ad.make_dual(x, torch.ones_like(x)))
            assert forward_ad.unpack_dual(out).tangent is not None

    one(lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)))
    one(lambda f, x: torch.func.vmap(f)(x))
    one(lambda f, x: torch.func.grad(lambda x: f(x).sum())(x))
    one(dual)
    return found


def test_divergence_is_found_under_forward_derivatives(run_ranks: RankPool) -> None:
    for found in run_ranks(2, _transformed):
        assert len(found) == 4
        assert all("contents of x differ in forward 4 of M" in message for message in found)


def _removed(rank: int, world: int) -> tuple[str, bool]:
    model = _plain()
    for change in (0, 0, 0, rank):
        model(_input(float(change)))
    with pytest.raises(PeerMismatchError) as caught:
        remove_context_parallel(model)
    return str(caught.value), installed_on(model) is None


def test_divergence_in_the_last_forward_is_raised_by_removal_which_is_done(run_ranks: RankPool) -> None:
    for message, is_removed in run_ranks(3, _removed):
        assert "contents of x differ in forward 4" in message
        assert is_removed


def _new_shapes(rank: int, world: int) -> str:
    """Shapes that change on all ranks are no error; a rank where they change alone raises before any transfer."""
    model = _plain()
    for tokens in (10, 10, 10, 8, 9, 9, 10):
        model(_input(tokens=tokens))
    with pytest.raises(PeerMismatchError) as caught:
        model(_input(tokens=8 + rank))  # both are new after 10
    return str(caught.value)


def test_unequal_shapes_are_raised_before_they_meet(run_ranks: RankPool) -> None:
    for message in run_ranks(2, _new_shapes):
        assert "the shapes, types or whole numbers of x differ in forward 8" in message


def _regrouped(rank: int, world: int, folder: str) -> bool:
    """A comparison is under way while its process group ends; the next group does not see it."""
    for turn in range(2):
        model = _plain()
        for change in (0, 0, 0, rank):
            model(_input(float(change)))
        dist.destroy_process_group()
        store, patience = f"file://{folder}/{turn}", timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=patience)
        dist.barrier()  # no rank ends while another one still connects
        remove_context_parallel(model)
    return True


def test_a_comparison_under_way_does_not_outlive_its_process_group(run_ranks: RankPool, tmp_path: Path) -> None:
    assert all(run_ranks(2, _regrouped, str(tmp_path)))


class _Attends(nn.Module):
    """Attention of x [batch, tokens, width] or [tokens, width] to itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(-3)
        return F.scaled_dot_product_attention(x, x, x).squeeze(-3)


class _Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = _Attends(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.inner(x))
        return out


def _alone(rank: int, world: int) -> bool:
    """The first rank calls the model more often than the other, with a tensor that its plan leaves whole."""
    model, x = _Holds(), _input()
    plan = {
        "": {"x": ContextParallelInput(split_dim=1, expected_dims=3)},
        "out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), plan)
    for _ in range(3):
        model(x)
    if rank == 0:
        for _ in range(2):
            model(x[0])
    dist.barrier()
    model(x)
    remove_context_parallel(model)
    return True


def test_a_rank_that_calls_the_model_alone_does_not_hang(run_ranks: RankPool) -> None:
    assert all(run_ranks(2, _alone))
