"""`degrees="auto"`: rank 0 plans, all ranks use its choice, or raise its error."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp import fabric
from lightning_cp.planning import degrees as planning
from lightning_cp.planning.degrees import device_of
from tests.dist.lightning_ranks import STRATEGIES, fabric_of, train
from tests.dist.module import Clips, TrainsWan
from tests.harness import RankPool
from tests.models.wan import wan

pytestmark = pytest.mark.filterwarnings("ignore")
INPUTS = {
    "hidden_states": torch.empty(2, 4, 3, 6, 10, device="meta"),
    "timestep": torch.empty(2, dtype=torch.int64, device="meta"),
    "encoder_hidden_states": torch.empty(2, 7, 16, device="meta"),
}


def _with_example(module: nn.Module, inputs: Any = INPUTS) -> Any:
    module.example_input_array = inputs  # type: ignore[assignment]
    return module


class _Reports(TrainsWan):
    """Keeps its losses. It has the inputs of its transformer as an example."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.example_input_array = tuple(INPUTS.values())

    @override
    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.losses.append(float(loss))
        return loss


def _both(rank: int, world: int) -> tuple[tuple[int, int], list[float], list[float]]:
    """The planned degrees, and losses with them and with the same degrees given by hand."""

    def losses(strategy: Any) -> list[float]:
        seed_everything(1, verbose=False)
        module = _Reports()
        train(rank, world, strategy, module, DataLoader(Clips(4), batch_size=2))
        return module.losses

    kind = STRATEGIES["trainer", "cp_fsdp"]
    auto = kind(degrees="auto", data_parallel=1)
    planned = losses(auto)
    degrees = auto.context.ring, auto.context.ulysses
    return degrees, planned, losses(kind(ring=degrees[0], ulysses=degrees[1]))


def test_losses_are_those_of_the_chosen_degrees_given_by_hand(run_ranks: RankPool) -> None:
    results = run_ranks(2, _both, init=False)
    for degrees, planned, by_hand in results:
        assert degrees == results[0][0]
        assert degrees[0] * degrees[1] == 2
        assert planned == by_hand
        assert len(planned) == 2


def _reads_values() -> nn.Module:
    import diffusers

    class ReadsValues(diffusers.WanTransformer3DModel):  # type: ignore[misc]
        def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
            if timestep.max() > 0:
                return super().forward(hidden_states, timestep, encoder_hidden_states)
            return None

    return ReadsValues(**wan().config)


ERRORS: dict[str, tuple[Any, str]] = {  # the strategy's example, and what the error says
    "no module": (lambda: None, "pass example=module to the strategy"),
    "reads values": (lambda: _with_example(_reads_values()), "this forward cannot be traced: it reads values"),
    "no transformer": (lambda: _with_example(nn.Linear(2, 2)), "Linear has no transformer with a plan yet"),
    "no arguments": (lambda: wan().build(), "WanTransformer3DModel.example_input_array is not set"),
    "other arguments": (
        lambda: _with_example(wan().build(), {"latents": 1}),
        "example_input_array must hold the arguments of WanTransformer3DModel.forward",
    ),
    "no memory": (lambda: _with_example(wan().build().float()), r"nothing fits: .* needs .* GB more than 2 GB"),
}


def _error(rank: int, world: int, case: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if case == "no memory":
            small = device_of(("NVIDIA H100 80GB HBM3", int(2.0001e9)), 2)
            patch.setattr(planning, "device_of", lambda *_: small)
        with pytest.raises(ValueError, match="found no degrees") as caught:
            fabric_of(rank, world, fabric.ContextParallelStrategy(degrees="auto", example=ERRORS[case][0]()))
    return str(caught.value)


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.default(2)
def test_errors_are_raised_on_every_rank_with_what_to_give(run_ranks: RankPool, case: str) -> None:
    first, second = run_ranks(2, _error, case, init=False)
    assert first == second
    assert re.search(ERRORS[case][1], first), first


def _in_a_group(rank: int, world: int) -> str:
    strategy = fabric.ContextParallelStrategy(degrees="auto", example=_with_example(wan(5).build().float()))
    with pytest.raises(ValueError, match="already has a process group") as caught:
        fabric_of(rank, world, strategy)
    return str(caught.value)


@pytest.mark.full
def test_a_process_that_is_connected_already_cannot_plan(run_ranks: RankPool) -> None:
    assert len(set(run_ranks(2, _in_a_group))) == 1
