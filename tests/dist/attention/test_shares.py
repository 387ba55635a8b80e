"""Unequal shares: tokens and heads are divided by them; results and gradients are exact in every mode."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cp import (
    ContextParallelConfig,
    apply_context_parallel,
    check_plan,
    context_parallel_attention,
    parallelize_pipeline,
)
from lightning_cp.attention import operator
from lightning_cp.attention.grid import grid_forward
from lightning_cp.engine.apply import installed_on
from lightning_cp.errors import PeerMismatchError
from lightning_cp.mesh.groups import groups_for
from lightning_cp.vae import parallelize_vae
from tests import features
from tests.dist.attention.test_exactness import problems
from tests.dist.problems import Problem, errors, expect, part_of, solve, whole
from tests.dist.vaes import ALL, make_vae
from tests.harness import RankPool
from tests.harness.cases import in_turn
from tests.models import FIRST, TINY
from tests.models.modes import MODES
from tests.models.tiny import dense_flex_attention, with_short_text
from tests.models.wan import wan
from tests.pipelines import PIPES

SHARES = {2: (2, 1), 3: (1, 3, 2), 4: (4, 1, 2, 1), 6: (1, 2, 3, 1, 1, 2)}
_TOLERANCE = 1e-9


def _checked(rank: int, world: int, name: str, mode: str, text: int | None) -> str:
    """What differs from one process; empty if nothing does."""
    tiny = TINY[name]
    model, arguments = tiny.build(), tiny.arguments()
    if mode == "replay":
        if not model._supports_gradient_checkpointing:
            return ""
        model.enable_gradient_checkpointing()
    if text is not None:
        arguments = with_short_text(arguments, text)
    if "return_dict" in inspect.signature(type(model).forward).parameters:  # Z-Image's ControlNet has none
        arguments["return_dict"] = False
    with dense_flex_attention():
        found = check_plan(model, arguments, MODES[mode](world), training=tiny.training, shares=SHARES[world])
    assert found.outputs
    return "" if found.passed else str(found)


_MODES = (("ring", 3), ("ulysses", 3), ("replay", 3), ("rotation", 4), ("unified", 4), ("unified3", 6))
_REST = [(name, *mode) for name, mode in in_turn(list(FIRST.values())[::12], _MODES)]


@pytest.mark.parametrize(("name", "mode", "world"), [("flux", "ulysses", 3), *_REST])
@pytest.mark.default(1)
def test_models_are_exact(run_ranks: RankPool, name: str, mode: str, world: int) -> None:
    assert run_ranks(world, _checked, name, mode, None) == [""] * world


def test_text_shorter_than_the_group_is_exact(run_ranks: RankPool) -> None:
    assert run_ranks(3, _checked, "hunyuan_video", "ring", 2) == [""] * 3


def _divided(rank: int, world: int, ring: int, ulysses: int) -> tuple[int, set[int]]:
    """Tokens of this rank in the first block, and the heads that it has after the exchange of Ulysses."""
    model, tokens, heads = wan().build(), list[int](), set[int]()
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)

    def attended(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        heads.add(q.shape[2])
        return grid_forward(q, *args, **kwargs)

    apply_context_parallel(model, config, shares=SHARES[world])
    model.blocks[0].attn1.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(_first(args, kwargs)), with_kwargs=True
    )
    with mock.patch.object(operator, "grid_forward", attended):
        model(**wan().arguments(), return_dict=False)
    return tokens[0], heads


def _first(args: Any, kwargs: Any) -> int:
    return int((args[0] if args else kwargs["hidden_states"]).shape[1])


def test_tokens_and_heads_follow_the_shares(run_ranks: RankPool) -> None:
    """Wan has 4 heads and 45 tokens. In unified attention heads follow the sums 4 + 2 and 1 + 1 of the shares."""
    everyone = run_ranks(3, _divided, 1, 3)
    assert [tokens for tokens, _ in everyone] == [8, 22, 15]
    assert [heads for _, heads in everyone] == [{1}, {2}, {1}]
    assert [tokens for tokens, _ in run_ranks(3, _divided, 3, 1)] == [8, 22, 15]
    everyone = run_ranks(4, _divided, 2, 2)
    assert [heads for _, heads in everyone] == [{3}, {1}, {3}, {1}]


def _attention(rank: int, world: int, cases: list[Problem]) -> list[str]:
    """Attention calls that are not exact."""
    wrong = []
    for problem in cases:
        given = whole(problem)
        actual = solve(problem, given, rank, shares=SHARES[world])
        found = errors(actual, part_of(expect(problem, given), problem, rank))
        if not max(found.values()) < 1e-10:
            wrong.append(f"rank {rank}: {problem}: {found}")
    return wrong


@pytest.mark.parametrize(
    ("world", "ring", "ulysses", "rotate"), [(3, 1, 3, "allgather"), (6, 2, 3, "allgather"), (4, 2, 2, "grid 1x2")]
)
@pytest.mark.default(1)
def test_attention_with_masks_and_grouped_heads_is_exact(
    run_ranks: RankPool, world: int, ring: int, ulysses: int, rotate: str
) -> None:
    cases = list(problems(ring, ulysses, rotate))
    cases = [x for x in cases if x.heads != 4][:: 5 if world == 3 else 2]
    assert {(x.heads, x.kv_heads) for x in cases} >= {(7, 7), (8, 2), (9, 3), (6, 1)}
    wrong = [line for lines in run_ranks(world, _attention, cases, timeout_s=300) for line in lines]
    assert not wrong, "\n".join(wrong[:5])


def _sampled(rank: int, world: int, mode: str, cfg: int) -> float:
    """Largest error of a pipeline's latents, or pictures decoded by all ranks."""
    torch.manual_seed(0)
    tiny = PIPES["wan"]
    pipe: Any = tiny.make()
    pipe.set_progress_bar_config(disable=True)

    def latents(seed: int) -> Tensor:
        value = getattr(pipe(**tiny.inputs(), generator=torch.Generator().manual_seed(seed)), tiny.output)
        return torch.as_tensor(value if isinstance(value, Tensor) else value[-1])

    alone = latents(7)
    parallelize_pipeline(pipe, MODES[mode](world // cfg), cfg=cfg, shares=SHARES[world // cfg])
    installed = installed_on(pipe.transformer)
    assert installed is not None
    assert installed.session.groups.shares == SHARES[world // cfg]
    return float((latents(7 + rank) - alone).abs().max() / alone.abs().max())


@pytest.mark.parametrize(("mode", "world", "cfg"), [("ulysses", 3, 1), ("ring", 4, 2)])
@pytest.mark.default(1)
def test_pipelines_give_one_process_latents(run_ranks: RankPool, mode: str, world: int, cfg: int) -> None:
    error = max(run_ranks(world, _sampled, mode, cfg))
    assert error < 1e-4
    features.compared("unequal devices (`shares=`)", error)


def _in_patches(rank: int, world: int) -> float:
    """Largest difference that shares make to a pipeline that runs in patches (PipeFusion)."""
    tiny, found = PIPES["flux"], []
    for shares in (None, SHARES[world]):
        torch.manual_seed(0)
        pipe: Any = tiny.make()
        pipe.set_progress_bar_config(disable=True)
        config = ContextParallelConfig(ring_degree=world)
        parallelize_pipeline(pipe, config, patches=2, warmup=1, shares=shares)
        value = getattr(pipe(**tiny.inputs(), generator=torch.Generator().manual_seed(7)), tiny.output)
        found.append(torch.as_tensor(value if isinstance(value, Tensor) else value[-1]))
    return float((found[1] - found[0]).abs().max() / found[0].abs().max())


@pytest.mark.full
def test_patches_give_the_same_with_unequal_shares(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _in_patches)) < 1e-4


def _decoded(rank: int, world: int, tiles: bool) -> tuple[float, int]:
    """Error of a parallel VAE, and the values that its first convolution gets on this rank."""
    vae: Any = make_vae("kl", torch.float64)
    if tiles:
        vae.enable_tiling(**ALL["kl"].tiles)
    z = torch.randn(ALL["kl"].latent, generator=torch.Generator().manual_seed(7)).double() / 2
    values = [0]

    def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        values[0] += args[0].numel()

    with torch.no_grad():
        expected = vae.decode(z).sample
        vae.decoder.conv_in.register_forward_pre_hook(add)
        parallelize_vae(vae, groups_for(ContextParallelConfig(ring_degree=world), SHARES[world]))
        found = vae.decode(z).sample
    return float((found - expected).abs().max()), values[0]


@pytest.mark.parametrize("tiles", [False, True])
def test_rows_and_tiles_of_an_autoencoder_follow_the_shares(run_ranks: RankPool, tiles: bool) -> None:
    everyone = run_ranks(3, _decoded, tiles)
    assert max(error for error, _ in everyone) < 1e-12
    first, second, third = (values for _, values in everyone)
    assert first < third <= second


def _unlike(rank: int, world: int) -> list[str]:
    """Errors of each rank where the last one was given other shares, or another rotate_method."""
    found = []
    config, given = ContextParallelConfig(ulysses_degree=world), (1, 3, 2) if rank < world - 1 else None
    q = torch.randn(1, 4, 4, 8)
    for call in (
        lambda: apply_context_parallel(wan().build(), config, shares=given),
        lambda: context_parallel_attention(q, q, q, parallel_config=config, shares=given),
        lambda: apply_context_parallel(
            wan().build(), ContextParallelConfig(ring_degree=world, rotate_method="alltoall" if given else "allgather")
        ),
    ):
        try:
            call()
            found.append("")
        except PeerMismatchError as error:
            found.append(str(error))
        dist.barrier()
    return found


def test_ranks_with_other_shares_are_refused_on_all_ranks(run_ranks: RankPool) -> None:
    for at_set_up, in_attention, of_methods in run_ranks(3, _unlike):
        assert "shares must be equal" in at_set_up
        assert "rank 2 was given [1, 1, 1] and rank 0 [1, 3, 2]" in at_set_up
        assert "checksum of shares" in in_attention
        assert "rotate_method must be equal" in of_methods
        assert "rank 2 was given allgather and rank 0 alltoall" in of_methods
