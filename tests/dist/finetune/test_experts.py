"""Two experts in one run: on several ranks they are trained as in one process, and an idle one does not change."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_cp.fabric import ContextParallelFSDPStrategy, ContextParallelStrategy
from lightning_cp.families import StoredBatch, family_for
from lightning_cp.finetune import FineTuning, LoraSettings, add_lora
from lightning_cp.finetune.families.stored import collate
from lightning_cp.objectives import Uniform, objective_for
from lightning_cp.training.ema import WeightAverage
from lightning_cp.training.ranks import DataShard
from tests.dist.lightning_ranks import fabric_of, whole
from tests.families.cases import made
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES, STEPS, BATCH = ("transformer", "transformer_2"), 6, 2
CP, FSDP = ContextParallelStrategy, ContextParallelFSDPStrategy


def tuning(*names: str, lora: bool, **settings: Any) -> FineTuning:
    """Experts of a tiny Wan 2.2; half of the steps train each. All weights are float64, or adapters float32."""
    pipe = made("wan_two_experts")
    family = family_for(pipe)
    transformers: dict[str, Any] = {name: copy.deepcopy(getattr(pipe, name)).train() for name in names or NAMES}
    for name, transformer in transformers.items():
        if lora:
            add_lora(transformer, LoraSettings(rank=4, alpha=16.0), family=family, component=name)
        else:
            transformer.double().requires_grad_(True)
    dtype = torch.float32 if lora else torch.float64
    choice: dict[str, Any] = {"density": Uniform(), "shift": 7.0, "loss_dtype": dtype}
    objective = objective_for(family, seed=1, component=names[0] if names else NAMES, **choice)
    return FineTuning(transformers[names[0]] if names else transformers, family, objective=objective, **settings)


def batch(tuned: FineTuning, step: int, shard: DataShard) -> StoredBatch:
    """This data rank's samples of a step: two of four clips with captions of different lengths."""
    generator, samples = torch.Generator().manual_seed(0), []
    for length in (3, 7, 5, 9):
        latents = torch.randn(4, 3, 4, 6, generator=generator, dtype=torch.float64)
        text = torch.randn(length, 16, generator=generator, dtype=torch.float64)
        samples.append({"latents": latents, "prompt_embeds": text})
    chosen = [samples[(step + 2 * i) % 4] for i in range(BATCH)]
    each = BATCH // shard.size
    return collate(chosen[shard.rank * each : (shard.rank + 1) * each], tuned.family.text)


def parts_of(named: dict[str, Tensor], optimizer: Any, average: WeightAverage) -> dict[str, list[Tensor]]:
    """Copies of each trained weight, its optimizer state and its average; of shards, the local part."""
    averages, parts = average.state_dict(), {}
    for name, x in named.items():
        tensors = [x, averages[name], *(value for _, value in sorted(optimizer.state.get(x, {}).items()))]
        parts[name] = [(x.to_local() if isinstance(x, DTensor) else x).detach().clone() for x in tensors]
    return parts


def accumulating(fabric: Any, model: Any, *, enabled: bool) -> AbstractContextManager[None]:
    """Average no gradients over the ranks, as the recipe does with replicated weights."""
    if fabric is None or isinstance(fabric.strategy, FSDP):
        return nullcontext()
    context: AbstractContextManager[None] = fabric.no_backward_sync(model, enabled=enabled)
    return context


def trained(
    tuned: FineTuning, fabric: Any = None, *, steps: Iterable[int] = range(STEPS)
) -> tuple[list[tuple[str, float]], dict[str, list[Tensor]]]:
    """Train as the recipe does. Returns: expert and loss of each step; weights, averages and optimizer states."""
    module: Any = tuned.transformer
    assert len(getattr(module, "idle", ())) == (tuned.expert is not None)
    optimizer: Any = torch.optim.AdamW([x for x in module.parameters() if x.requires_grad], lr=1e-3, weight_decay=0.1)
    shard, model = DataShard(0, 1), module
    if fabric is not None:
        model, optimizer = fabric.setup(module, optimizer)
        tuned.transformer, shard = model, DataShard.of(fabric.strategy)
        optimizer = optimizer.optimizer
    average, losses = WeightAverage(module, 0.5), []
    for step in steps:
        named = {name: x for name, x in module.named_parameters() if x.requires_grad}
        before, total = parts_of(named, optimizer, average), 0.0
        data = batch(tuned, step, shard).to(next(x.device for x in module.parameters() if x.requires_grad))
        for part in tuned.micro_batches(data, step=step, first_index=shard.rank * len(data)):
            with accumulating(fabric, model, enabled=not part.is_last):
                loss, _ = tuned.loss(part)
                loss.backward() if fabric is None else fabric.backward(loss)
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        idle = getattr(module, "idle", ())
        average.update(module, step=step + 1, without=idle)
        after = parts_of(named, optimizer, average)
        for name, values in before.items():
            same = [torch.equal(x, y) for x, y in zip(values, after[name], strict=False)]
            if name.startswith(idle):
                assert all(same), f"{name} changed while its expert was idle"
                assert len(values) == len(after[name]), f"{name} got an optimizer state while its expert was idle"
            else:
                assert not all(same) or not values[0].numel(), f"{name} did not train"  # a shard may be empty
                assert len(after[name]) == 5, "weight, average, step and two moments"
        mean = total if fabric is None else fabric.all_reduce(total, reduce_op="mean")
        losses.append((str(tuned.expert), float(mean)))
    named = {name: x for name, x in module.named_parameters() if x.requires_grad}
    averages = average.state_dict()
    ends = {
        name: [
            whole(y.detach()).clone() for y in (x, averages[name], *(v for _, v in sorted(optimizer.state[x].items())))
        ]
        for name, x in named.items()
    }
    return losses, ends


def _train(rank: int, world: int, kind: type, degrees: dict[str, int], lora: bool, micro: int | None) -> Any:
    return trained(tuning(lora=lora, micro_batch_size=micro), fabric_of(rank, world, kind(**degrees)))


@pytest.mark.parametrize(
    ("world", "kind", "degrees", "lora", "micro"),
    [(3, CP, {"ring": 3}, False, None), (2, FSDP, {"ulysses": 2}, False, 1), (4, FSDP, {"ring": 2}, True, None)],
)
@pytest.mark.full
def test_experts_on_several_ranks_train_as_in_one_process(
    world: int, kind: type, degrees: dict[str, int], lora: bool, micro: int | None, run_ranks: RankPool
) -> None:
    losses, expected = trained(tuning(lora=lora))
    drawn = [name for name, _ in losses]
    assert drawn not in (sorted(drawn), sorted(drawn, reverse=True)), "one is idle between steps that train it"
    tolerance = 1e-3 if lora else 1e-5  # Wan computes norms and rotary embeddings in float32
    for found, weights in run_ranks(world, _train, kind, degrees, lora, micro, init=False):
        assert [name for name, _ in found] == drawn
        assert [x for _, x in found] == pytest.approx([x for _, x in losses], rel=tolerance / 10)
        assert weights.keys() == expected.keys()
        for number, kind_of_value in enumerate(("weights", "averages", "first moments", "second moments", "steps")):
            mine, theirs = (torch.cat([x[number].flatten() for x in one.values()]) for one in (weights, expected))
            distance = float((mine - theirs).norm() / theirs.norm())
            assert distance < tolerance, f"{kind_of_value}: {distance}"


@pytest.mark.parametrize("name", NAMES)
def test_an_expert_trains_as_in_a_run_of_its_own_with_the_same_steps(name: str) -> None:
    losses, both = trained(tuning(lora=True))
    steps = [step for step, (drawn, _) in enumerate(losses) if drawn == name]
    assert 1 < len(steps) < STEPS
    found, own = trained(tuning(name, lora=True), steps=steps)
    assert [x for _, x in found] == [losses[step][1] for step in steps]
    assert {f"{name}.{weight}" for weight in own} == {weight for weight in both if weight.startswith(f"{name}.")}
    for weight, values in own.items():
        assert all(map(torch.equal, values, both[f"{name}.{weight}"])), weight
