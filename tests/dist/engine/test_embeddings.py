"""Embeddings of the patches: each rank embeds its own, and no value or gradient changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.engine.sharding import convolutions
from lightning_cp.engine.sharding.convolutions import LocalTokens, own_patches
from lightning_cp.errors import PlanError
from lightning_cp.finetune import LoraSettings, add_lora
from lightning_cp.plans import REGISTERED, Plan
from tests.dist.compare import nothing_narrowed
from tests.dist.lightning_ranks import STRATEGIES, distance, fabric_of, whole
from tests.harness import RankPool
from tests.models import TINY
from tests.models.tiny import Tiny
from tests.models.wan import wan

TOKENS = 45  # of the tiny Wan: uneven at 2 and at 4 ranks
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


def _sample(index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index)
    return {
        "hidden_states": torch.randn(1, 4, 3, 6, 10, generator=generator, dtype=torch.float64).requires_grad_(),
        "encoder_hidden_states": torch.randn(1, 7, 16, generator=generator, dtype=torch.float64),
        "timestep": torch.tensor([300 * index + 4]),
    }


def _loss(model: nn.Module, sample: dict[str, Any]) -> Tensor:
    output: Tensor = model(**sample, return_dict=False)[0].double()
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return (output * weights).sum() + output.square().sum()


def _train(rank: int, world: int, kind: str, ring: int, ulysses: int, lora: bool, checkpoint: str) -> dict[str, float]:
    """Relative errors of each gradient; "tokens": number of tokens that this rank has embedded."""
    torch.set_default_dtype(torch.float64)
    try:
        # A gather of the embedding is an error in this test.
        with nothing_narrowed(), mock.patch.object(convolutions, "note_once", _refused):
            return _compared(rank, world, kind, ring, ulysses, lora, checkpoint)
    finally:
        torch.set_default_dtype(torch.float32)


def _refused(message: str) -> None:
    if "reentrant checkpoint" not in message:  # only it may gather the embedding
        raise AssertionError(message)


def _compared(
    rank: int, world: int, kind: str, ring: int, ulysses: int, lora: bool, checkpoint: str
) -> dict[str, float]:
    context = ring * ulysses
    model: Any = wan().build().double()
    if lora:
        add_lora(model, LoraSettings(rank=2, targets=(*ATTENTION, "patch_embedding")))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight)
    samples = [_sample(index) for index in range(world // context)]
    (sum(_loss(model, sample) for sample in samples) / len(samples)).backward()  # type: ignore[union-attr]
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    sample = samples[rank // context]
    of_input, sample["hidden_states"].grad = sample["hidden_states"].grad * len(samples), None
    if checkpoint == "model":
        model.enable_gradient_checkpointing()
    elif checkpoint:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block, getattr(CheckpointImpl, checkpoint))
    strategy = STRATEGIES["fabric", kind](ring=ring, ulysses=ulysses)
    # Lightning refuses 64-true with FSDP2; 32-true changes no dtypes.
    fabric = fabric_of(rank, world, strategy, precision="32-true" if kind == "cp_fsdp" else "64-true")
    wrapped, _ = fabric.setup(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    embedded: list[int] = []

    def recorded(x: Tensor, patch: tuple[int, ...], grid: tuple[int, ...], own: range) -> Tensor:
        embedded.append(len(own))
        return own_patches(x, patch, grid, own)

    with mock.patch("lightning_cp.engine.sharding.convolutions.own_patches", recorded):
        fabric.backward(_loss(wrapped, sample))
    found = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    errors = {name: distance(whole(found[name]), gradient) for name, gradient in expected.items()}
    assert {name for name, gradient in found.items() if gradient is not None} == expected.keys()
    mean = sample["hidden_states"].grad.clone()
    groups = [dist.new_group(list(range(i, i + context))) for i in range(0, world, context)]
    dist.all_reduce(mean, group=groups[rank // context])
    return {**errors, "input": distance(mean / context, of_input), "tokens": sum(embedded)}


@pytest.mark.parametrize(
    ("kind", "world", "ring", "ulysses", "lora", "checkpoint"),
    [
        ("cp", 3, 3, 1, True, "model"),
        ("cp", 2, 1, 2, False, "REENTRANT"),
        ("cp", 4, 2, 2, False, "NO_REENTRANT"),
        ("cp_fsdp", 3, 1, 3, True, "NO_REENTRANT"),
        ("cp_fsdp", 4, 2, 1, False, ""),
    ],
)
@pytest.mark.default(1)
def test_each_rank_embeds_its_tokens_with_exact_gradients(
    kind: str, world: int, ring: int, ulysses: int, lora: bool, checkpoint: str, run_ranks: RankPool
) -> None:
    by_rank = run_ranks(world, _train, kind, ring, ulysses, lora, checkpoint)
    assert sum(errors.pop("tokens") for errors in by_rank) == TOKENS * world // (ring * ulysses)
    for errors in by_rank:
        assert any("patch_embedding" in name for name in errors)
        assert all(error < 1e-12 for error in errors.values()), errors


def _added(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output + torch.linspace(0, 1, output.shape[2], dtype=output.dtype).view(-1, 1, 1)


def _frames_reversed(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return torch.stack(output.unbind(2)[::-1], 2)


def _used_twice(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output + output.square().mean()


def _rows_swapped(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """Return another order of the same values, of the same shape."""
    return output.transpose(2, 3).reshape(output.shape)


def _scaled(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return 2 * output


class _Hooked:
    """A change of a model: a hook behind its embedding."""

    def __init__(self, hook: Callable[..., Tensor]) -> None:
        self.hook, self.__name__ = hook, hook.__name__

    def __call__(self, model: Any) -> None:
        model.patch_embedding.register_forward_hook(self.hook)


class _OfStandardPatches(nn.Conv3d):
    def forward(self, x: Tensor) -> Tensor:
        embedded = super().forward(x)
        return embedded / embedded.std()


def _with_hook_before(model: Any) -> None:
    model.patch_embedding.register_forward_hook(lambda _module, _args, output: output / output.std())


def _with_hook_of_input(model: Any) -> None:
    model.patch_embedding.register_forward_pre_hook(lambda _module, args: args[0] / args[0].std())


def _with_subclass(model: Any) -> None:
    model.patch_embedding = _OfStandardPatches(4, 48, (1, 2, 2), (1, 2, 2), dtype=torch.float64)
    for parameter in model.patch_embedding.parameters():
        nn.init.constant_(parameter, 0.1)


def _with_forward(model: Any) -> None:
    forward = model.patch_embedding.forward
    model.patch_embedding.forward = lambda x: forward(x) / forward(x).std()


def _with_padding(model: Any) -> None:
    model.patch_embedding.padding = (0, 2, 2)
    model.patch_embedding.stride = (1, 4, 3)


def _with_two_calls(model: Any) -> None:
    """The model embeds its first frame alone, before all frames, and scales the text by the mean."""
    means: list[Tensor] = []
    model.rope.register_forward_pre_hook(
        lambda _module, args: means.append(model.patch_embedding(args[0][:, :, :1]).mean())
    )
    model.condition_embedder.register_forward_pre_hook(
        lambda _module, args: (args[0], args[1] * (1 + means[-1]), *args[2:])
    )


def _with_reentrant_checkpoint(model: Any) -> None:
    model.patch_embedding = checkpoint_wrapper(model.patch_embedding, CheckpointImpl.REENTRANT)


_CHANGES: tuple[tuple[Any, bool], ...] = (  # by a user; True: after the plan is installed
    *((_Hooked(hook), True) for hook in (_added, _frames_reversed, _used_twice, _rows_swapped, _scaled)),
    *((_with_hook_before, False), (_with_hook_of_input, False), (_with_hook_of_input, True)),
    *((_with_subclass, False), (_with_forward, False), (_with_forward, True)),
    *((_with_two_calls, False), (_with_padding, True)),
    *((_with_reentrant_checkpoint, False), (_with_reentrant_checkpoint, True)),
)


def _with_changes(rank: int, world: int) -> dict[str, float]:
    """Errors of gradients of a model that a user changes. Anomaly detection is on."""
    errors = {}
    warnings.filterwarnings("ignore", "Anomaly Detection")
    with nothing_narrowed(), torch.autograd.detect_anomaly():
        for change, is_after in _CHANGES:
            found = []
            for is_parallel in (False, True):
                model, sample = wan().build().double(), _sample(1)
                steps: list[Callable[[Any], Any]] = [change]
                if is_parallel:
                    steps.insert(
                        0 if is_after else 1,
                        lambda x: apply_context_parallel(x, ContextParallelConfig(ring_degree=world)),
                    )
                for step in steps:
                    step(model)
                torch.autograd.backward(_loss(model, sample))
                gradients = [sample["hidden_states"].grad, *(p.grad for p in model.parameters())]
                found.append(torch.cat([x.flatten() for x in gradients]))  # type: ignore[union-attr]
            dist.all_reduce(found[1])
            errors[f"{change.__name__} {is_after}"] = distance(found[1] / world, found[0])
    return errors


@pytest.mark.full
def test_what_a_user_changes_around_an_embedding_stays_exact(run_ranks: RankPool) -> None:
    for errors in run_ranks(3, _with_changes, timeout_s=180):
        assert all(error < 1e-12 for error in errors.values()), errors


def _random_state(rank: int, world: int) -> list[int]:
    model: Any = wan().build()
    add_lora(model, LoraSettings(rank=2, targets=("patch_embedding",), dropout=0.5))
    apply_context_parallel(model.double().train(), ContextParallelConfig(ring_degree=world))
    torch.manual_seed(3)
    with nothing_narrowed():
        model(**_sample(1), return_dict=False)
    state: list[int] = torch.get_rng_state().tolist()
    return state


@pytest.mark.full
def test_dropout_of_an_adapter_keeps_random_states_equal(run_ranks: RankPool) -> None:
    first, second = run_ranks(2, _random_state)  # 22 and 23 patches
    assert first == second


def _no_early_gather(rank: int, world: int, names: list[str]) -> dict[str, int]:
    """Number of `LocalTokens` that were made, by model."""
    return {name: _made(TINY[name], world) for name in names}


def _made(tiny: Tiny, world: int) -> int:
    model: Any = tiny.build().eval()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    made = []

    class Counted(LocalTokens):
        def __init__(self, *arguments: Any) -> None:
            made.append(1)
            super().__init__(*arguments)

    with (
        torch.no_grad(),
        mock.patch.object(convolutions, "LocalTokens", Counted),
        mock.patch.object(convolutions, "note_once", _refused),
    ):
        model(**tiny.arguments())
    return len(made)


def _embeds(tiny: Tiny) -> bool:
    plan = REGISTERED[tiny.kind].variant_for(SimpleNamespace(**tiny.config)) if tiny.kind in REGISTERED else ""
    return isinstance(plan, Plan) and bool(plan.embeddings)


@pytest.mark.full
def test_no_class_gathers_what_its_plan_embeds_in_shards(run_ranks: RankPool) -> None:
    names = list({tiny.kind: name for name, tiny in TINY.items() if _embeds(tiny)}.values())
    for made in run_ranks(2, _no_early_gather, names):
        assert len(made) > 5
        assert all(made.values()), made


def _local(tokens: Tensor) -> Any:
    return LocalTokens(tokens, [2, 2], SimpleNamespace(name="two ranks"))  # type: ignore[arg-type]


def test_only_views_that_keep_the_order_give_this_ranks_tokens() -> None:
    tokens = torch.randn(1, 2, 4)
    local = _local(tokens)
    assert (len(local), local.shape, local.device) == (1, (1, 4, 4), tokens.device)
    kept = torch.unflatten(local.transpose(1, 2), 2, (2, 2)).flatten(2).transpose(1, 2).contiguous()
    assert torch.equal(kept.own(1, (2, 2)), tokens)
    assert kept.to(torch.float64).own(1, (2, 2)).dtype == torch.float64
    assert local.transpose(1, 2).own(1, (2, 2)) is None
    assert local.own(1, (1, 3)) is None, "sizes of another sequence"


def test_what_would_lose_a_gradient_of_an_embedding_is_refused() -> None:
    local = _local(torch.randn(1, 2, 4, requires_grad=True))
    for change in (lambda x: x.add_(1), lambda x: x.__iadd__(1), lambda x: x.register_hook(print)):
        with pytest.raises(PlanError, match="would change an embedding on shards"):
            change(local)
    with torch.no_grad(), pytest.raises(PlanError, match="its gradient would be lost"):
        local.mean()


@pytest.mark.parametrize("patch", [(2,), (2, 1), (1, 2, 2), (2, 3, 2)])
def test_own_patches_are_those_of_the_convolution(patch: tuple[int, ...]) -> None:
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(patch) - 1]
    layer = kind(3, 5, patch, stride=patch, dtype=torch.float64)
    x = torch.randn(2, 3, *(7, 6, 5)[: len(patch)], dtype=torch.float64)
    output = layer(x)
    grid = tuple(output.shape[2:])
    expected = output.flatten(2)
    for start, stop in [(0, expected.shape[2]), (1, 3), (2, 3)]:
        found = layer(own_patches(x, patch, grid, range(start, stop)))
        assert found.shape == (2, 5, stop - start, *[1] * (len(patch) - 1))
        torch.testing.assert_close(found.flatten(2), expected[:, :, start:stop])
