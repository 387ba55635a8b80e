"""Plans that users write: what they leave out is named, and what docs/plans.md offers works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp import ContextParallelConfig, ContextParallelInput, ContextParallelOutput, apply_context_parallel
from lightning_cp.errors import PlanError, ShapeError
from lightning_cp.plans import LOCAL, Attention, Plan, split
from tests.dist.compare import averaged, outcome, worst
from tests.harness import RankPool


def _attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Video attends to itself, then to the text, in one module; rope [1, s, 1] turns the video's queries and keys."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.kv, self.out, self.heads = nn.Linear(16, 48), nn.Linear(16, 32), nn.Linear(16, 16), heads

    def forward(self, x: Tensor, text: Tensor, rope: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out(_attend(q * rope, k * rope, v, self.heads))
        return x + self.out(_attend(x, *self.kv(text).chunk(2, -1), self.heads))


class Video(nn.Module):
    """A user's model, with a main modality of its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.proj_out = nn.Linear(16, 3)

    def forward(self, x: Tensor, text: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        rope = torch.cos(torch.arange(x.shape[1], dtype=x.dtype))[None, :, None]
        for block in self.blocks:
            x = block(x, text, rope)
        return (self.proj_out(x),)


_ATTENTION: dict[str, Any] = {"blocks": (Attention(("video",)), LOCAL)}
_BLOCK: dict[str, Any] = {"x": split(1, "video"), "rope": split(1, "video")}
_GATHER = {"proj_out": split(1, "video")}
_GOOD = Plan({"blocks": _BLOCK}, _GATHER, attention=_ATTENTION, main="video")


def _model(video: int = 15, text: int = 7) -> tuple[Video, dict[str, Any]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    sizes = {"x": video, "text": text}
    arguments = {k: torch.randn(2, n, 16, generator=generator, dtype=torch.float64) for k, n in sizes.items()}
    return Video().double(), arguments


def _local_among_others(rank: int, world: int, mode: str, video: int, text: int) -> tuple[float, float]:
    model, arguments = _model(video, text)
    expected, gradients = outcome(model, arguments)
    degrees = {"ring": {"ring_degree": world}, "ulysses": {"ulysses_degree": world}}[mode]
    apply_context_parallel(model, ContextParallelConfig(**degrees), _GOOD)
    out, found = outcome(model, arguments)
    return float((out - expected).abs().max()), worst(averaged(found, world), gradients)


@pytest.mark.parametrize(("mode", "video", "text"), [("ring", 15, 7), ("ulysses", 16, 5), ("ulysses", 15, 15)])
@pytest.mark.default(2)
def test_local_calls_beside_others_in_one_module_are_exact(
    run_ranks: RankPool, mode: str, video: int, text: int
) -> None:
    """Also where text has as many tokens as some ranks' video (of 16: 6, 5 and 5), or all of it."""
    for output, gradient in run_ranks(3, _local_among_others, mode, video, text):
        assert output < 1e-12
        assert gradient < 1e-12


def _compiled_local(rank: int, world: int) -> str:
    model, arguments = _model()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), _GOOD)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="LOCAL and other attention calls in its plan") as caught:
        model(**arguments)
    return str(caught.value)


@pytest.mark.full
def test_local_calls_beside_others_are_refused_when_compiled(run_ranks: RankPool) -> None:
    assert all("cannot be compiled" in message for message in run_ranks(2, _compiled_local, timeout_s=240))


def _left_out(rank: int, world: int) -> list[str]:
    messages = []
    config = ContextParallelConfig(ring_degree=world)
    without_rope = {"x": split(1, "video")}
    theirs = {
        "blocks.0": {"x": ContextParallelInput(split_dim=1, expected_dims=3)},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }
    for plan in (Plan({"blocks": without_rope}, _GATHER, attention=_ATTENTION, main="video"), theirs):
        model, arguments = _model()
        apply_context_parallel(model, config, plan)
        with pytest.raises(PlanError) as caught:
            model(**arguments)
        messages.append(str(caught.value))
    return messages


def test_an_argument_that_a_plan_does_not_split_is_named(run_ranks: RankPool) -> None:
    for ours, theirs in run_ranks(3, _left_out):
        for message in (ours, theirs):
            assert "blocks.0 failed on shards (RuntimeError: " in message
            assert "'rope' (shape (1, 15, 1)) holds 15 in dim 1" in message
        assert "all tokens of video" in ours
        assert "the number of all tokens. Add it to the plan" in theirs


def _unrelated(rank: int, world: int) -> str:
    """An error of the model's own, once the plan has been seen to fit."""
    model, arguments = _model()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), _GOOD)
    model(**arguments)
    model.blocks[1].out = nn.Linear(15, 16).double()
    with pytest.raises(RuntimeError) as caught:
        model(**arguments)
    return type(caught.value).__name__


def _lost_link(rank: int, world: int, text: str) -> str:
    """An exchange of the first block fails, while an argument could be split."""

    def fail(*_: object) -> None:
        raise RuntimeError(text)

    model, arguments = _model()
    model.blocks[0].qkv.register_forward_hook(fail)
    plan = Plan({"blocks": {"x": split(1, "video")}}, _GATHER, attention=_ATTENTION, main="video")
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), plan)
    with pytest.raises((RuntimeError, PlanError)) as caught:
        model(**arguments)
    return str(caught.value)


@pytest.mark.parametrize("text", ["Read error: Connection reset by peer", "Timed out waiting 1800000ms for recv"])
def test_a_failed_exchange_is_not_blamed_on_the_plan(run_ranks: RankPool, text: str) -> None:
    assert set(run_ranks(3, _lost_link, text)) == {text}


def test_errors_of_the_model_itself_stay_as_they_are(run_ranks: RankPool) -> None:
    assert set(run_ranks(2, _unrelated)) == {"RuntimeError"}


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan({"blocks": _BLOCK}, _GATHER), r"main='image' is none of the modalities .*\(video\): set main="),
        (Plan({"blocks": _BLOCK}, {}, main="video"), "gathers nothing"),
        (
            Plan({"blocks": _BLOCK}, _GATHER, main="video", embeddings={"embed": "vidoe"}),
            r"embeddings\['embed'\]='vidoe' is none of the modalities .*\(video\): use the one of",
        ),
        (Plan({"blocks": {**_BLOCK, "ropes": split(1, "video")}}, _GATHER, main="video"), "'ropes'"),
        (Plan({"layers": _BLOCK}, _GATHER, main="video"), "'layers'"),
    ],
)
def test_plans_that_cannot_fit_are_refused_before_anything_is_touched(plan: Plan, said: str) -> None:
    model, arguments = _model()
    before = set(model.__dict__)
    with pytest.raises(PlanError, match=said):
        apply_context_parallel(model, ContextParallelConfig(), plan)
    assert set(model.__dict__) == before
    model(**arguments)


def _too_short(rank: int, world: int) -> str:
    model, arguments = _model()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), _GOOD)
    with pytest.raises(ShapeError) as caught:
        model(**{**arguments, "x": arguments["x"][:, :2]})
    return str(caught.value)


def test_a_main_modality_of_another_name_must_have_a_token_on_each_rank(run_ranks: RankPool) -> None:
    assert all("2 video tokens, fewer than the 3 ranks" in message for message in run_ranks(3, _too_short))
