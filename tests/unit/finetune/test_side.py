"""A side model and its base are called with each other's dtypes, and only what a family trains has gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp.errors import FamilyError
from lightning_cp.families import SideModel, collate, family_for
from lightning_cp.family_check import store, training_models
from lightning_cp.finetune import SteeredTransformer, freeze_base
from lightning_cp.finetune.side import (
    called_by_pipeline,
    compile_blocks,
    models_by_component,
    trained_model,
    until_called,
)
from lightning_cp.objectives import objective_for
from tests.families.cases import CASES, made, media

pytestmark = pytest.mark.filterwarnings("ignore")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dtype = nn.Linear(2, 2).bfloat16(), torch.bfloat16
        self.given: dict[str, Any] = {}

    def forward(self, **arguments: Any) -> Any:
        self.given = arguments
        return (self.layer(arguments["x"] + arguments["steer"][0]),)


class Side(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.given: dict[str, Any] = {}

    def forward(self, **arguments: Any) -> list[Tensor]:
        self.given = arguments
        return [self.layer(arguments["x"])]


def test_activations_are_cast_and_times_are_not() -> None:
    base, side = Base(), Side()
    both = SteeredTransformer(base, side, SideModel("control", ("steer",)))
    x, time = torch.randn(1, 2).bfloat16(), torch.tensor([0.123456789])
    (output,) = both(x=x, time=time, control={"x": x, "time": time})
    assert side.given["x"].dtype == torch.float32
    assert base.given["steer"][0].dtype == output.dtype == both.dtype == torch.bfloat16
    for given in (side.given, base.given):
        assert given["time"].dtype == torch.float32
        assert torch.equal(given["time"], time)
    with called_by_pipeline(both):  # a pipeline calls the models itself
        (steering,) = side(x=x, time=time)
    assert side.given["x"].dtype == torch.float32
    assert side.given["time"].dtype == torch.float32
    assert steering.dtype == torch.bfloat16
    assert side(x=x.float(), time=time)[0].dtype == torch.float32, "the hooks are removed"
    with called_by_pipeline(base):
        pass
    assert both.side is both.get_submodule("control") is side
    assert trained_model(nn.Sequential(both)) is side
    assert trained_model(base) is base
    assert models_by_component(both, "control") == {"control": side, "transformer": base}


@pytest.mark.parametrize(
    ("case", "prefixes"),
    [("flux_controlnet", ("controlnet.",)), ("wan_vace", ("vace_blocks.", "vace_patch_embedding."))],
)
@pytest.mark.default(1)
def test_only_what_the_family_trains_has_gradients(case: str, prefixes: tuple[str, ...]) -> None:
    pipe = copy.deepcopy(made(case))
    family = family_for(pipe)
    (model,) = training_models(pipe, family)
    freeze_base(model, family)
    stored = collate(store(family, pipe, CASES[case].captions, media(case)), family.text)
    objective_for(family, seed=0).loss(model, family, stored, step=0).backward()  # type: ignore[no-untyped-call]
    with_gradients = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert with_gradients
    assert all(name.startswith(prefixes) for name in with_gradients)
    assert {prefix for prefix in prefixes if any(name.startswith(prefix) for name in with_gradients)} == {*prefixes}


@pytest.mark.parametrize("case", ["flux_controlnet", "wan_vace"])
@pytest.mark.default(1)
def test_controls_must_be_given_and_be_as_large_as_the_media(case: str) -> None:
    pipe = made(case)
    family, given = family_for(pipe), dict(media(case))
    control = given.pop("reference")
    with pytest.raises(FamilyError, match=f"{case} needs a .*control.*"):
        family.encode_media(pipe, given)
    with pytest.raises(FamilyError, match=r"as large (as the picture|and as long as the clip), \[.*: got "):
        family.encode_media(pipe, {**given, "reference": control[..., :8]})


def test_other_controlnets_have_no_family() -> None:
    pipe = copy.deepcopy(made("flux_controlnet"))
    pipe.controlnet.register_to_config(num_mode=3)
    with pytest.raises(FamilyError, match=r"FluxControlNetPipeline: the controlnet has no family .*\(num_mode\)"):
        family_for(pipe)


def test_a_control_of_another_width_is_refused() -> None:
    pipe = copy.deepcopy(made("wan_vace"))
    pipe.transformer.register_to_config(vace_in_channels=96)
    with pytest.raises(FamilyError, match=r"has vace_in_channels=96, but the VAE makes 72: two latents and a mask"):
        family_for(pipe)


def test_the_blocks_of_a_controlnet_are_compiled_like_those_of_its_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, compiled = made("flux_controlnet"), list[str]()
    monkeypatch.setattr(nn.Module, "compile", lambda self, *_, **__: compiled.append(type(self).__name__))
    blocks = ["FluxTransformerBlock", "FluxTransformerBlock", "FluxSingleTransformerBlock"]
    compile_blocks(pipe.controlnet)
    assert compiled == blocks
    compile_blocks(pipe.transformer)
    assert compiled[3:] == [*blocks, "FluxSingleTransformerBlock"]


def test_the_first_call_ends_the_work_and_all_of_its_arguments_have_names() -> None:
    model, done = nn.Bilinear(2, 2, 2), []
    with until_called(nn.Linear(2, 2), model) as arguments:
        model(torch.ones(2), input2=torch.zeros(2))
        done.append("more work")
    assert {name: x.tolist() for name, x in arguments.items()} == {"input1": [1, 1], "input2": [0, 0]}
    assert not done
    assert model(torch.ones(2), torch.zeros(2)).isfinite().all(), "the hook is gone"
