"""Models run context-parallel against the same model in one process: outputs and every parameter's gradient."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cp import (
    ContextParallelConfig,
    ContextParallelInput,
    ContextParallelOutput,
    apply_context_parallel,
    remove_context_parallel,
)
from lightning_cp.errors import InterceptionError, PeerMismatchError, PlanError
from tests.dist.compare import averaged, of_first_rank, outcome, worst
from tests.dist.plain import PLAIN_PLAN, Block, Plain
from tests.harness import RankPool
from tests.harness.cases import in_turn
from tests.models import TINY
from tests.models.flux import flux
from tests.models.tiny import with_short_text
from tests.models.wan import wan

# Tiny models for which diffusers has a plan.
_NAMES = ("flux", "flux2", "qwen_image", "wan", "wan_per_token_timestep", "ltx", "wan_image_to_video", "chronoedit")
THEIR_PLANS = {
    **{name: TINY[name] for name in _NAMES},
    "helios": replace(TINY["helios"], config={**TINY["helios"].config, "num_layers": 40}),  # the plan names this many
    "ltx2": TINY["ltx2_isolated"],  # their plan leaves cross_attn_rope whole, which only this does not use
    "minimax_h3": TINY["minimax_h3"],
}
_DEGREES = {3: [(3, 1), (1, 3)], 4: [(2, 2)]}
_TOLERANCE = 1e-9


def _configs(world: int) -> list[ContextParallelConfig]:
    return [
        ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, rotate_method=rotate)
        for ring, ulysses in _DEGREES[world]
        for rotate in (("allgather", "alltoall") if ring > 1 else ("allgather",))
    ] + [ContextParallelConfig(world, rotate_method="grid")] * (world == 4)


def _compare(rank: int, world: int, name: str, theirs: bool, text: int | None = None) -> list[tuple[str, float, float]]:
    tiny = (THEIR_PLANS if theirs else TINY)[name]
    model, arguments = tiny.build(), tiny.arguments()
    if text is not None:
        arguments = with_short_text(arguments, text)
    expected, gradients = of_first_rank(lambda: outcome(model, arguments))
    attributes, state = set(model.__dict__), list(model.state_dict())
    plan = type(model)._cp_plan if theirs else None
    results = []
    for config in _configs(world):
        apply_context_parallel(model, config, plan)
        out, found = outcome(model, arguments)
        error = worst(averaged(found, world), gradients)
        results.append((str(config), float((out - expected).abs().max()), error))
        remove_context_parallel(model)
        assert set(model.__dict__) == attributes
        assert list(model.state_dict()) == state
    return results


def _check(results: list[list[tuple[str, float, float]]]) -> None:
    for of_rank in results:
        for config, output, gradient in of_rank:
            assert output < _TOLERANCE, (config, output)
            assert gradient < _TOLERANCE, (config, gradient)


@pytest.mark.parametrize("name", ["sd3", "hunyuan_video"])
@pytest.mark.default(1)
def test_text_shorter_than_the_group_is_exact(run_ranks: RankPool, name: str) -> None:
    _check(run_ranks(3, _compare, name, False, 2))


def _unmasked(rank: int, world: int) -> float:
    """QwenImage with a short text and no mask, positional."""
    tiny = TINY["qwen_image"]
    model, arguments = tiny.build(), with_short_text(tiny.arguments(), 2)
    del arguments["encoder_hidden_states_mask"]
    expected = model(**arguments, return_dict=False)[0]
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    hidden, text = arguments.pop("hidden_states"), arguments.pop("encoder_hidden_states")
    return float((model(hidden, text, **arguments, return_dict=False)[0] - expected).detach().abs().max())


def test_a_short_text_without_a_mask_is_exact(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _unmasked)) < 1e-5


@pytest.mark.parametrize(("name", "world"), in_turn(THEIR_PLANS, (3, 4)))
@pytest.mark.default(1)
def test_plans_of_diffusers_are_exact(run_ranks: RankPool, name: str, world: int) -> None:
    _check(run_ranks(world, _compare, name, True))


def _audio_and_video(rank: int, world: int) -> list[tuple[str, float, float]]:
    """LTX2's modalities attend to each other: some queries and keys are split, others are whole on all ranks."""
    tiny = THEIR_PLANS["ltx2"]
    model, arguments = tiny.build(), {**tiny.arguments(), "isolate_modalities": False}
    plan = {**type(model)._cp_plan, "cross_attn_rope": type(model)._cp_plan["rope"]}
    expected, gradients = outcome(model, arguments)
    results = []
    for config in _configs(world):
        apply_context_parallel(model, config, plan)
        out, found = outcome(model, arguments)
        results.append((str(config), float((out - expected).abs().max()), worst(averaged(found, world), gradients)))
        remove_context_parallel(model)
    return results


def test_modalities_that_stay_whole_attend_to_ones_that_are_split(run_ranks: RankPool) -> None:
    _check(run_ranks(3, _audio_and_video))


def _two_lengths(rank: int, world: int, reentrant: bool) -> float:
    model = wan().build()

    def gradients() -> dict[str, Tensor | None]:
        model.zero_grad(set_to_none=True)
        outputs = [model(**wan(frames).arguments(), return_dict=False)[0] for frames in (3, 2)]
        torch.stack([x.square().sum() for x in outputs]).sum().backward()
        return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=reentrant) if reentrant else None)
    return worst(averaged(gradients(), world), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.default(1)
def test_two_checkpointed_forwards_of_different_lengths_replay_each_its_own(
    run_ranks: RankPool, reentrant: bool
) -> None:
    assert max(run_ranks(3, _two_lengths, reentrant)) < 1e-5  # with the model's float32 casts


def _plain(rank: int, world: int) -> tuple[float, float, bool, str]:
    torch.manual_seed(0)
    model, x = Plain().double(), {"x": torch.randn(2, 11, 16, dtype=torch.float64)}
    expected, gradients = outcome(model, x)
    bystander = copy.deepcopy(model)
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world), PLAIN_PLAN)
    out, found = outcome(model, x)
    undisturbed = torch.equal(outcome(bystander, x)[0], expected)
    with pytest.raises(PlanError) as caught:
        apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world), PLAIN_PLAN)
    errors = float((out - expected).abs().max()), worst(averaged(found, world), gradients)
    return *errors, undisturbed, str(caught.value)


class _Mixed(nn.Module):
    """A module with an attention call that is intercepted, and one that cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.attn = Block(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
        self.proj_out = nn.Linear(16, 3)

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        x = self.block(x)
        return (self.proj_out(x + self.attn(x, x, x, need_weights=False)[0]),)


def _inferred(rank: int, world: int) -> float:
    """Lengths from which the split cannot be inferred: the ranks exchange them, without a hang, twice."""
    plan = {"block": {"x": ContextParallelInput(split_dim=1)}, "proj_out": PLAIN_PLAN["proj_out"]}
    config, generator = ContextParallelConfig(ring_degree=world), torch.Generator().manual_seed(1)
    largest = 0.0
    for tokens in (2, 7, 8, 9):
        if tokens < world:
            continue
        model = Plain().double()
        x = {"x": torch.randn(2, tokens, 16, generator=generator, dtype=torch.float64)}
        expected, gradients = outcome(model, x)
        apply_context_parallel(model, config, PLAIN_PLAN)
        for _ in range(2):
            out, found = outcome(model, x)
            largest = max(largest, float((out - expected).abs().max()), worst(averaged(found, world), gradients))
    late = Plain().double()  # its first block attends before anything is split
    expected, gradients = outcome(late, x)
    apply_context_parallel(late, config, {"blocks.1": PLAIN_PLAN["blocks.0"], "proj_out": PLAIN_PLAN["proj_out"]})
    out, found = outcome(late, x)
    largest = max(largest, float((out - expected).abs().max()), worst(averaged(found, world), gradients))
    mixed = _Mixed().double()
    apply_context_parallel(mixed, config, plan)
    if world == 1:
        mixed(torch.randn(2, 7, 16, dtype=torch.float64))
        return largest
    with pytest.raises(InterceptionError, match="attn"):
        mixed(torch.randn(2, 7, 16, dtype=torch.float64))
    return largest


@pytest.mark.parametrize("world", [3, 1])
def test_what_was_split_is_found_out_alike_on_all_ranks(run_ranks: RankPool, world: int) -> None:
    assert max(run_ranks(world, _inferred)) < _TOLERANCE


def test_a_plain_module_with_a_diffusers_plan_is_exact_and_others_are_undisturbed(run_ranks: RankPool) -> None:
    for output, gradient, undisturbed, message in run_ranks(3, _plain):
        assert output < 1e-12
        assert gradient < 1e-12
        assert undisturbed
        assert "already" in message


def _refusals(rank: int, world: int) -> list[str]:
    config = ContextParallelConfig(ring_degree=world)
    model = flux().build()
    attributes = set(model.__dict__)
    messages = []
    for plan in (
        {"nowhere": ContextParallelOutput(gather_dim=1)},
        {"": {"nothing": ContextParallelInput(split_dim=1)}, "proj_out": ContextParallelOutput(gather_dim=1)},
        {"": {"hidden_states": ContextParallelInput(split_dim=1)}},
        {"": {"hidden_states": ContextParallelOutput(gather_dim=1)}, "proj_out": ContextParallelOutput(gather_dim=1)},
        {"": {"hidden_states": ContextParallelInput(split_dim=1)}, "proj_out": ContextParallelInput(split_dim=1)},
        {"proj_out": []},
        {3: ContextParallelOutput(gather_dim=1)},
    ):
        with pytest.raises(PlanError) as caught:
            apply_context_parallel(model, config, plan)
        messages.append(str(caught.value))
        assert set(model.__dict__) == attributes
        assert not model._forward_pre_hooks
    with pytest.raises(PlanError, match="no plan is registered"):
        apply_context_parallel(nn.Linear(2, 2), config)
    apply_context_parallel(model, config)
    short = {**flux().arguments(), "hidden_states": torch.randn(2, 2, 4, dtype=torch.float64)}
    with pytest.raises(ValueError, match="fewer than the 3 ranks"):
        model(**{**short, "img_ids": torch.randn(2, 3, dtype=torch.float64)})
    differing = {**flux().arguments(), "timestep": torch.tensor([0.1, 0.1 * (rank + 1)], dtype=torch.float64)}
    with pytest.raises(PeerMismatchError, match="timestep"):
        model(**differing)
    model.transformer_blocks[0].attn.set_processor(type(flux().build().transformer_blocks[0].attn.processor)())
    with pytest.raises(PeerMismatchError, match="timestep"):
        model(**differing)
    model.transformer_blocks[0].attn.set_processor(lambda *args, **kwargs: args[1])
    with pytest.raises(PlanError, match=r"was changed .*: transformer_blocks\.0\.attn\.processor is a function"):
        model(**flux().arguments())
    return messages


def test_plans_and_inputs_that_do_not_fit_are_refused_on_every_rank(run_ranks: RankPool) -> None:
    for messages in run_ranks(3, _refusals):
        assert "has no module 'nowhere'" in messages[0]
        assert "'nothing'" in messages[1]
        assert "gathers nothing" in messages[2]
        assert "holds a ContextParallelOutput, expected a ContextParallelInput" in messages[3]
        assert "holds a ContextParallelInput, expected a ContextParallelOutput" in messages[4]
        assert "is empty" in messages[5]
        assert "the plan has the key 3" in messages[6]
