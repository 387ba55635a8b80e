"""Log-probabilities of a rollout and of the first training forward are equal bit for bit: the first ratio is 1.

The other tests measure what the ratio becomes where the two forwards differ.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cp import selective_checkpoint
from lightning_cp.data import RandomStream
from lightning_cp.fabric import ContextParallelFSDPStrategy, ContextParallelStrategy
from lightning_cp.finetune import LoraSettings, add_lora
from lightning_cp.objectives import SdeStep, group_advantages, policy_loss, reference_policy, sde_step
from lightning_cp.training import sample_noise
from tests.dist.lightning_ranks import fabric_of, flat
from tests.harness import RankPool
from tests.models.wan import wan

pytestmark = pytest.mark.filterwarnings("ignore")
SIGMAS = (1.0, 0.8, 0.5)
Modes = dict[str, Callable[[], AbstractContextManager[Any]]]
MODES: Modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@dataclass(frozen=True)
class Case:
    """How a policy is trained."""

    ring: int = 1
    ulysses: int = 1
    sharded: bool = False
    checkpointing: Any = None  # True, or the function
    precision: str = "32-true"
    lora: float | None = None  # dropout
    backend: str | None = None  # of compiled blocks

    def model(self) -> nn.Module:
        """Tiny Wan, with adapters that change its output."""
        model: Any = wan().build().float()
        if self.lora is not None:
            add_lora(model, LoraSettings(rank=2, targets=["to_q", "to_v", "net.2"], dropout=self.lora))
            with torch.no_grad():
                for name, x in model.named_parameters():
                    if "lora_B" in name:
                        x.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
        if self.checkpointing is not None:
            chosen = {} if self.checkpointing is True else {"gradient_checkpointing_func": self.checkpointing}
            model.enable_gradient_checkpointing(**chosen)
        if self.backend is not None:
            model.compile_repeated_blocks(backend=self.backend, fullgraph=True)
        built: nn.Module = model
        return built

    def set_up(self, rank: int, world: int) -> tuple[Any, Any]:
        """Fabric, and the model that it set up."""
        kind = ContextParallelFSDPStrategy if self.sharded else ContextParallelStrategy
        fabric = fabric_of(
            rank, world, kind(ring=self.ring, ulysses=self.ulysses, check_peers="off"), precision=self.precision
        )
        return fabric, fabric.setup(self.model())


def arguments(rows: slice = slice(None)) -> dict[str, Tensor]:
    """Inputs of Wan in float32; `hidden_states` are the noise at sigma=1."""
    return {name: x.float()[rows] for name, x in wan().arguments().items()}


def step_of(model: Any, x: Tensor, index: int, rows: slice = slice(None), **kind: Tensor) -> SdeStep:
    """One random step of a model on some rows of the batch."""
    sigma, following = SIGMAS[index : index + 2]
    inputs = arguments(rows) | {"hidden_states": x.float(), "timestep": torch.full((len(x),), 1000 * sigma)}
    velocity = model(**inputs, return_dict=False)[0]
    return sde_step(x, velocity, sigma, following, eta=0.7, **kind)  # type: ignore[arg-type]


def rollout(model: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(x, next, log-probability) of each step."""
    x, taken = arguments()["hidden_states"], []
    for index in range(len(SIGMAS) - 1):
        noise = sample_noise(x.shape, seed=3, step=index, stream=RandomStream.ROLLOUT)
        step = step_of(model, x, index, noise=noise)
        taken.append((x, step.next, step.log_prob))
        x = step.next
    return taken


def _promise(rank: int, world: int, case: Case) -> tuple[list[Tensor], bool]:
    """Log-probabilities of rollouts and of training, each [steps, b]; whether the weights have changed after a step."""
    fabric, model = case.set_up(rank, world)
    found, taken = [], []
    model.eval()
    for mode in MODES.values():
        with mode():
            taken = rollout(model)
        taken = [tuple(x.clone() for x in one) for one in taken]  # no inference tensors
        found.append(torch.stack([log_prob for _, _, log_prob in taken]))
    model.train()
    before, trained = flat(model).clone(), []
    optimizer = fabric.setup_optimizers(torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=1.0))
    advantages = group_advantages(torch.arange(2.0), [0, 0])
    for index, (x, following, old) in enumerate(taken):
        if case.lora is not None:
            with torch.no_grad(), reference_policy(model):
                reference = step_of(model, x, index, next=following)
            assert not torch.equal(reference.log_prob, old)
        step = step_of(model, x, index, next=following)
        loss = policy_loss(step.log_prob, old, advantages, clip=1e-3)
        assert torch.equal(loss.detach(), -advantages), "a ratio that is not 1"
        fabric.backward(loss.mean())
        trained.append(step.log_prob.detach())
    optimizer.step()
    return [*found, torch.stack(trained)], not torch.equal(before, flat(model))


CASES = {
    "ring 3, selective checkpointing, LoRA": (3, Case(ring=3, lora=0.0, checkpointing=selective_checkpoint)),
    "ulysses 2, checkpointing": (2, Case(ulysses=2, checkpointing=True)),
    "ring 3, sharded, LoRA, checkpointing": (3, Case(ring=3, sharded=True, lora=0.0, checkpointing=True)),
    "ulysses 2, sharded, bf16-mixed": (2, Case(ulysses=2, sharded=True, precision="bf16-mixed")),
    "ring 2, compiled blocks": (2, Case(ring=2, backend="inductor")),
    "data 2, ring 2": (4, Case(ring=2)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.default(1)
def test_the_first_ratio_is_exactly_one(run_ranks: RankPool, name: str) -> None:
    world, case = CASES[name]
    results = run_ranks(world, _promise, case, init=False)
    for (no_grad, inference_mode, training), changed in results:
        assert torch.equal(no_grad, training)
        assert torch.equal(inference_mode, training)
        assert training.dtype == torch.float32
        assert changed
        assert torch.equal(training, results[0][0][2])  # and equal on all ranks


def _backward_inside(rank: int, world: int, case: Case) -> tuple[str, bool]:
    """What a backward of the policy inside of the context raises; whether one outside gives all gradients."""
    fabric, model = case.set_up(rank, world)
    inputs = arguments()
    inputs["hidden_states"].requires_grad_()
    loss = model(**inputs, return_dict=False)[0].square().mean()
    with torch.no_grad(), reference_policy(model):
        reference = model(**inputs, return_dict=False)[0]
        try:
            with fabric.no_backward_sync(model):
                fabric.backward(loss)
            raised = "nothing"
        except ValueError as error:
            raised = str(error)
    fabric.backward((model(**inputs, return_dict=False)[0] - reference).square().mean())
    return raised, all(x.grad is not None for x in model.parameters() if x.requires_grad)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.default(1)
def test_a_backward_inside_of_the_reference_policy_is_refused_on_every_rank(
    run_ranks: RankPool, reentrant: bool
) -> None:
    case = Case(ring=2, lora=0.0, checkpointing=partial(checkpoint, use_reentrant=reentrant))
    for raised, trained in run_ranks(2, _backward_inside, case, init=False):
        assert "reference_policy has no gradients" in raised
        assert trained


def _ratio(log_prob: Tensor, old: Tensor) -> float:
    """The largest distance of the ratio from 1."""
    return float(((log_prob - old).exp() - 1).abs().max())


def _exceptions(rank: int, world: int) -> dict[str, float]:
    """The largest distance of the first ratio from 1 where rollout and training differ, by what differs.

    Latents are in float64, so that the ratio is not rounded: a difference is one of the model's output in float32.
    """
    _, model = Case(ring=world).set_up(rank, world)
    inputs, x = arguments(), arguments()["hidden_states"].double()
    noise = sample_noise(x.shape, seed=3, step=0, stream=RandomStream.ROLLOUT)
    with torch.no_grad():
        taken = step_of(model, x, 1, noise=noise)

        def ratio(policy: Any, following: Tensor = taken.next) -> float:
            return _ratio(step_of(policy, x, 1, next=following).log_prob, taken.log_prob)

        ratios = {"again": ratio(model)}
        twice = {name: torch.cat([value, value]) for name, value in inputs.items()}
        twice["timestep"] = torch.full((len(x) * 2,), 1000 * SIGMAS[1])
        conditional = model(**twice, return_dict=False)[0].chunk(2)[0]
        guided = sde_step(x, conditional, *SIGMAS[1:], next=taken.next, eta=0.7)
        ratios["CFG rows"] = _ratio(guided.log_prob, taken.log_prob)
        rows = [slice(0, 1), slice(1, 2)]
        halves = [step_of(model, x[one], 1, one, next=taken.next[one]).log_prob for one in rows]
        ratios["micro-batches"] = _ratio(torch.cat(halves), taken.log_prob)
        with torch.autocast("cpu", torch.bfloat16):
            ratios["autocast"] = ratio(model)
        ratios["latents in bfloat16"] = ratio(model, taken.next.bfloat16())
        average = wan().build().float()
        ratios["another degree"] = ratio(average)
        for parameter in average.parameters():
            parameter.mul_(0.99)
        ratios["EMA weights"] = ratio(average)
    return ratios | _with_adapters(rank, world, x, noise)


@torch.no_grad()
def _with_adapters(rank: int, world: int, x: Tensor, noise: Tensor) -> dict[str, float]:
    _, model = Case(ring=world, lora=0.5).set_up(rank, world)
    taken = step_of(model.eval(), x, 1, noise=noise)
    ratios = {"dropout": _ratio(step_of(model.train(), x, 1, next=taken.next).log_prob, taken.log_prob)}
    inner: Any = next(one for one in model.modules() if hasattr(one, "fuse_lora"))
    inner.fuse_lora()
    ratios["merged adapters"] = _ratio(step_of(model.eval(), x, 1, next=taken.next).log_prob, taken.log_prob)
    return ratios


@pytest.mark.full
def test_the_ratio_is_not_one_where_the_two_forwards_differ(run_ranks: RankPool) -> None:
    (ratios, *others) = run_ranks(3, _exceptions, init=False)
    assert others == [ratios, ratios]
    print(*(f"{name}: {ratio:.1e}" for name, ratio in ratios.items()), sep="\n")
    assert ratios.pop("again") == 0
    for name in ("CFG rows", "micro-batches", "another degree", "merged adapters"):  # rounding of float32
        assert ratios.pop(name) < 1e-7, name
    for name, ratio in ratios.items():  # another policy
        assert 1e-6 < ratio < 1, name


def _advantages(rank: int, world: int, ring: int) -> tuple[int, Tensor, Tensor]:
    """Of rewards on data groups with 2, 4, 6 … samples of prompts that are in all of them."""
    fabric, _ = Case(ring=ring).set_up(rank, world)
    data, size = fabric.strategy.data_rank, fabric.strategy.data_size
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(size * (size + 1), generator=generator)
    prompts = [index % 3 for index in range(len(rewards))]
    mine = slice(data * (data + 1), (data + 1) * (data + 2))
    of_prompt = rewards.view(-1, 3).double() if len(rewards) % 3 == 0 else None
    assert of_prompt is not None
    centred = of_prompt - of_prompt.mean(dim=0)
    expected = torch.stack([centred / of_prompt.std(dim=0, correction=0), centred / rewards.double().std(correction=0)])
    found = [group_advantages(rewards[mine], prompts[mine], std=std, eps=0.0) for std in ("group", "all")]  # type: ignore[arg-type]
    return data, torch.stack(found).double(), expected.flatten(1)[:, mine]


@pytest.mark.parametrize(("world", "ring"), [(3, 1), (4, 2)])
def test_advantages_are_those_of_one_process_for_uneven_data_groups(run_ranks: RankPool, world: int, ring: int) -> None:
    for rank, (data, found, expected) in enumerate(run_ranks(world, _advantages, ring, init=False)):
        assert data == rank // ring
        assert found.shape == (2, 2 * (data + 1))
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-7)
