"""Sharded weights: what is sharded, what stays whole, and what cannot be sharded (steps: test_training.py)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_cp.fabric import ContextParallelFSDPStrategy, ContextParallelStrategy
from tests.dist.lightning_ranks import BY_PLAN, STRATEGIES, distance, fabric_of, flat, train_alone, trainer_of, whole
from tests.dist.module import Clips, Mixed, TrainsWan, inputs
from tests.harness import RankPool
from tests.models.wan import wan

pytestmark = pytest.mark.filterwarnings("ignore")
ARGUMENTS = {
    "hidden_states": torch.randn(2, 4, 3, 6, 10, generator=torch.Generator().manual_seed(2)),
    "encoder_hidden_states": torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(3)),
    "timestep": torch.tensor([4, 700]),
}


def _loss(model: Any, **arguments: Any) -> Tensor:
    loss: Tensor = model(**(arguments or ARGUMENTS), return_dict=False)[0].float().square().mean()
    return loss


def _unlike(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Ranks that made other weights, and a use of no_backward_sync that must not outlast it."""
    fabric = fabric_of(rank, world, ContextParallelFSDPStrategy(ring=2, replicate=2))
    torch.manual_seed(rank)
    model = nn.Linear(8, 8)
    wrapped: Any = fabric.setup(model)
    values = flat(model)
    with fabric.no_backward_sync(wrapped, enabled=False):
        fabric.backward(wrapped(torch.ones(1, 8)).sum())
    model.zero_grad()
    fabric.backward(wrapped(torch.full((1, 8), float(rank))).sum())
    return values, flat(model, gradients=True)[:64]


def test_replicas_begin_alike_and_gradients_stay_averaged(run_ranks: RankPool) -> None:
    found = run_ranks(4, _unlike, init=False)
    for values, gradients in found:
        assert torch.equal(values, found[0][0])
        assert torch.equal(gradients, torch.full((64,), 1.5))


def _held(rank: int, world: int) -> list[int]:
    """Bytes of weights, gradients and optimizer state after a step: replicated, and sharded."""
    held = []
    for kind in (ContextParallelStrategy, ContextParallelFSDPStrategy):
        fabric = fabric_of(rank, world, kind(ring=world))
        model = wan().build().float()
        wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        fabric.backward(_loss(wrapped))
        optimizer.step()
        tensors = [x for p in model.parameters() for x in (p.detach(), p.grad)]
        tensors += [x for state in optimizer.state.values() for x in state.values()]
        held.append(sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors if x is not None))
    return held


def test_a_rank_holds_its_share_of_weights_gradients_and_optimizer_state(run_ranks: RankPool) -> None:
    for replicated, sharded in run_ranks(2, _held, init=False):
        assert sharded < replicated / 2 * 1.1


def _adapted() -> nn.Module:
    from peft import LoraConfig

    warnings.simplefilter("ignore")
    model = wan().build().float()
    model.requires_grad_(requires_grad=False)
    torch.manual_seed(3)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    return model


def _trained_gradients(model: nn.Module) -> Tensor:
    return torch.cat([whole(p.grad).flatten() for p in model.parameters() if p.requires_grad])


def _lora(rank: int, world: int, precision: str) -> tuple[Tensor, list[bool]]:
    fabric = fabric_of(rank, world, ContextParallelFSDPStrategy(ring=world), precision=precision)
    model = _adapted()
    wrapped, _ = fabric.setup(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    fabric.backward(_loss(wrapped))
    return _trained_gradients(model), [p.grad is None for p in model.parameters() if not p.requires_grad]


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 0.05)])
@pytest.mark.default(1)
def test_lora_on_a_frozen_base_that_is_sharded(run_ranks: RankPool, precision: str, tolerance: float) -> None:
    reference = _adapted()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        loss = _loss(reference)
    loss.backward()
    for found, untouched in run_ranks(2, _lora, precision, init=False):
        assert distance(found, _trained_gradients(reference)) < tolerance
        assert all(untouched)


def _late(rank: int, world: int) -> tuple[str, Tensor, Tensor]:
    for kind in (torch.optim.AdamW, torch.optim.Adagrad):  # Adagrad begins when it is created
        fabric = fabric_of(rank, world, ContextParallelFSDPStrategy(ring=world))
        model, alone = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
        optimizer = kind(model.parameters())
        if kind is torch.optim.AdamW:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        with pytest.raises(
            ValueError, match=r"already has state for weights.* is created after fabric.setup_mod"
        ) as caught:
            fabric.setup(model, optimizer)
    alone.load_state_dict({name: whole(x.detach()) for name, x in model.state_dict().items()})
    wrapped = fabric.setup_module(model)
    optimizers = [fabric.setup_optimizers(kind(model.parameters())), kind(alone.parameters())]
    for module, made in zip((wrapped, alone), optimizers, strict=True):
        fabric.backward(module(torch.ones(1, 2)).sum())
        made.step()
    return str(caught.value), flat(model), flat(alone)


def test_an_optimizer_that_has_begun_with_whole_weights_is_refused(run_ranks: RankPool) -> None:
    for said, found, expected in run_ranks(2, _late, init=False):
        assert "Adagrad" in said
        torch.testing.assert_close(found, expected)


def _tied(rank: int, world: int, path: Path) -> tuple[bool, Tensor]:
    fabric = fabric_of(rank, world, ContextParallelFSDPStrategy(ring=world, **BY_PLAN))
    with fabric.init_module(empty_init=True):
        model = Mixed()
    wrapped, optimizer = fabric.setup(model, model.configure_optimizers())
    fabric.load_raw(path, wrapped)
    model.scale.copy_(Mixed().scale)  # which no state dict holds
    fabric.backward(wrapped(inputs()).square().mean())
    optimizer.step()
    return model.tail.weight is model.head.weight, flat(model)


def test_tied_weights_stay_tied_without_storage(run_ranks: RankPool, tmp_path: Path) -> None:
    torch.save(Mixed().state_dict(), tmp_path / "weights.pt")
    expected = flat(train_alone(Mixed(), [inputs()]))
    for is_tied, weights in run_ranks(2, _tied, tmp_path / "weights.pt", init=False):
        assert is_tied
        assert distance(weights, expected) < 1e-5


def _refused(rank: int, world: int) -> list[str]:
    model = wan().build().to(torch.bfloat16)
    model.blocks[0].norm2.float()
    with pytest.raises(ValueError, match="cannot shard together") as mixed:
        fabric_of(rank, world, ContextParallelFSDPStrategy(ring=world)).setup(model)
    strategy = STRATEGIES["trainer", "cp_fsdp"](ring=world)
    trainer = trainer_of(rank, world, strategy, max_steps=1, callbacks=[EMAWeightAveraging()])
    with pytest.raises(ValueError, match=r"use EMACallback\(decay=") as average:
        trainer.fit(TrainsWan(), DataLoader(Clips(2)))
    return [str(mixed.value), str(average.value)]


def test_weights_of_several_dtypes_and_lightnings_averages_are_refused(run_ranks: RankPool) -> None:
    for mixed, average in run_ranks(2, _refused, init=False):
        assert "bfloat16" in mixed
        assert "norm2.weight in float32" in mixed
        assert "EMAWeightAveraging" in average


class _Block(nn.Module):
    """A layer, one for some micro-batches, and one that is never used. It returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.always(x)
        return (x + self.sometimes(x) if both else x).tanh().view(2, 3)


class _Sometimes(nn.Module):
    """Two blocks: the first uses its second layer in the last micro-batch only, the other in the second only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: Tensor, index: int) -> Tensor:
        out: Tensor = self.blocks[1](self.blocks[0](x, index == 2), index == 1)
        return out


_MICRO_BATCHES = (torch.arange(6.0).view(2, 3) / 6).repeat(3, 1, 1) + torch.arange(3.0)[:, None, None] / 2


def _accumulate(rank: int, world: int) -> tuple[dict[str, Tensor], list[str]]:
    """Return the gradients, and the warnings about views."""
    model = _Sometimes()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fabric = fabric_of(rank, world, ContextParallelFSDPStrategy(ring=world, mp_policy=policy))
    wrapped: Any = fabric.setup(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index, x in enumerate(_MICRO_BATCHES):
            with fabric.no_backward_sync(wrapped, enabled=index < 2):
                fabric.backward(wrapped(x, index).float().square().sum())
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return found, [str(one.message) for one in caught if "view tensor" in str(one.message)]


def test_micro_batches_that_use_other_weights_accumulate_as_in_one_process(run_ranks: RankPool) -> None:
    reference, expected = _Sometimes().bfloat16(), dict[str, Tensor]()
    for index, x in enumerate(_MICRO_BATCHES):
        reference.zero_grad()
        reference(x.bfloat16(), index).float().square().sum().backward()
        for name, p in reference.named_parameters():
            if p.grad is not None:
                expected[name] = expected.get(name, 0) + p.grad.float()
    assert len(expected) == 8
    for found, said in run_ranks(3, _accumulate, init=False):
        assert found.keys() == expected.keys()
        assert max(distance(found[name], x) for name, x in expected.items()) < 1e-5
        assert not said
