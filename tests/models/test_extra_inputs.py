"""Extra inputs of a transformer: ControlNets, IP adapters, LoRA scales, arguments in order, outputs as a dataclass."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp import apply_context_parallel, check_plan
from lightning_cp.errors import ShapeError
from tests.dist.compare import averaged, outcome, worst
from tests.harness import RankPool
from tests.harness.cases import in_turn
from tests.models import FIRST, TINY
from tests.models.controlnets import TINY as CONTROLNETS
from tests.models.controlnets import Control
from tests.models.modes import MODES
from tests.models.tiny import dense_flex_attention, randn
from tests.reference import max_error

_MODES = ("ring", "rotation", "ulysses")
Inputs = dict[str, Any]


class Controlled(nn.Module):
    """A ControlNet and its transformer in one module, as a training has them."""

    def __init__(self, tiny: Control) -> None:
        super().__init__()
        self.transformer = tiny.steers.build()
        self.control, self.fed = tiny.build(self.transformer), tiny.fed

    def forward(self, inputs: Inputs, control: Inputs, return_dict: bool) -> tuple[Tensor, ...]:
        steering = self.control(**control)
        steering = steering.to_tuple() if hasattr(steering, "to_tuple") else (steering,)
        (out,) = self.transformer(**inputs, **dict(zip(self.fed, steering, strict=True)), return_dict=return_dict)
        return tuple(out) if isinstance(out, list) else (out,)


def _check_control(rank: int, world: int, name: str, mode: str, parallel: tuple[str, ...]) -> tuple[float, float, bool]:
    """Errors of outputs and gradients, and whether the ControlNet has gradients."""
    tiny: Any = CONTROLNETS[name]
    given = {name: x for name, x in tiny.steers.arguments().items() if name not in tiny.fed}
    model = Controlled(tiny)
    expected, alone = outcome(model, {"inputs": given, "control": tiny.arguments()})
    for part in parallel:
        apply_context_parallel(getattr(model, part), MODES[mode](world))
    found, together = outcome(model, {"inputs": given, "control": tiny.arguments()})
    has_gradients = any(bool(x.any()) for path, x in alone.items() if path.startswith("control.") and x is not None)
    return max_error(found, expected), worst(averaged(together, world), alone), has_gradients


_BOTH = ("control", "transformer")
_KINDS = {tiny.kind: name for name, tiny in reversed(CONTROLNETS.items())}


@pytest.mark.parametrize(("name", "mode", "parallel"), in_turn(_KINDS.values(), _MODES, (_BOTH, ("transformer",))))
@pytest.mark.default(1)
def test_a_controlnet_trains_with_its_transformer(
    run_ranks: RankPool, name: str, mode: str, parallel: tuple[str, ...]
) -> None:
    for output, gradient, has_gradients in run_ranks(3, _check_control, name, mode, parallel):
        assert max(output, gradient) < 1e-9
        assert has_gradients


def _flux_adapter(name: str) -> tuple[nn.Module, Inputs]:
    """Two adapters, as FluxPipeline.load_ip_adapter puts them into a model: four tokens for each of two pictures, and
    three of one."""
    from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model, tokens = TINY[name].build(), (4, 3)
    processors = {
        path: FluxIPAdapterAttnProcessor(model.inner_dim, model.config.joint_attention_dim, tokens, scale=[1.3, 0.4])
        if path.startswith("transformer_blocks")
        else processor
        for path, processor in model.attn_processors.items()
    }
    model.set_attn_processor(processors)
    projections = [ImageProjection(6, model.config.joint_attention_dim, n) for n in tokens]
    model.encoder_hid_proj = MultiIPAdapterImageProjection(projections)
    g = torch.Generator().manual_seed(3)
    pictures = {"ip_adapter_image_embeds": [randn(g, 2, 2, 6), randn(g, 2, 1, 6)]}
    return model.double(), {**TINY[name].arguments(), "joint_attention_kwargs": pictures}


def _sd3_adapter(tokens: int = 5) -> tuple[nn.Module, Inputs]:
    """A model with an adapter that SD3IPAdapterMixin puts in."""
    from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
    from diffusers.models.embeddings import IPAdapterTimeImageProjection

    model = TINY["sd3"].build()
    width = model.inner_dim
    model.set_attn_processor(
        {path: SD3IPAdapterJointAttnProcessor2_0(width, width, 8, 16, scale=0.9) for path in model.attn_processors}
    )
    model.image_proj = IPAdapterTimeImageProjection(6, width, 16, 1, 8, 2, tokens, timestep_in_dim=8)
    pictures = {"ip_adapter_image_embeds": randn(torch.Generator().manual_seed(3), 2, 4, 6)}
    return model.double(), {**TINY["sd3"].arguments(), "joint_attention_kwargs": pictures}


ADAPTERS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "flux": lambda: _flux_adapter("flux"),
    "flux_short_text": lambda: _flux_adapter("flux_short_text"),
    "chroma": lambda: _flux_adapter("chroma"),
    "sd3": _sd3_adapter,
}


def _check_adapter(rank: int, world: int, name: str, mode: str) -> tuple[str, set[str]]:
    """What differs, and which parts of the model have gradients."""
    torch.manual_seed(0)
    model, inputs = ADAPTERS[name]()
    found = check_plan(model, {**inputs, "return_dict": False}, MODES[mode](world))
    parts = {
        part for x in found.gradients for part in ("processor", "encoder_hid_proj", "image_proj") if part in x.name
    }
    return "" if found.passed else str(found), parts


@pytest.mark.parametrize(
    ("name", "mode"), [("sd3", "ring"), ("flux", "rotation"), ("flux_short_text", "ulysses"), ("chroma", "ring")]
)
@pytest.mark.default(1)
def test_an_ip_adapter(run_ranks: RankPool, name: str, mode: str) -> None:
    for differing, parts in run_ranks(3, _check_adapter, name, mode):
        assert not differing
        assert parts >= {"processor", "image_proj" if name == "sd3" else "encoder_hid_proj"}


def _check_short_picture(rank: int, world: int) -> str:
    torch.manual_seed(0)
    model, inputs = _sd3_adapter(tokens=2)
    apply_context_parallel(model, MODES["ring"](world))
    with pytest.raises(ShapeError) as error:
        model(**inputs, return_dict=False)
    return str(error.value)


def test_a_call_that_a_rank_cannot_tell_from_another_is_refused_on_all_ranks(run_ranks: RankPool) -> None:
    for said in run_ranks(3, _check_short_picture):
        assert "have the same numbers of queries and keys on a rank" in said


def _in_order(kind: str, inputs: Inputs) -> list[Any]:
    """All arguments of a forward by their place, with its own default of `return_dict`: True."""
    import diffusers

    known = inspect.signature(getattr(diffusers, kind).forward).parameters
    names = [name for name, x in known.items() if x.kind is x.POSITIONAL_OR_KEYWORD][1:]
    assert set(inputs) <= set(names)
    return [inputs.get(name, known[name].default) for name in names]


def _check_in_order(rank: int, world: int, name: str) -> str:
    tiny = TINY[name]
    with warnings.catch_warnings(), dense_flex_attention():
        warnings.filterwarnings("ignore", "`Transformer2DModelOutput` is deprecated", FutureWarning)  # StableAudio's
        found = check_plan(tiny.build(), _in_order(tiny.kind, tiny.arguments()), MODES["ring"](world))
    return "" if found.outputs and found.passed else str(found)


_QUICK = ("flux", "sd3", "wan", "cogvideox", "qwen_image")
_IN_ORDER = list(dict.fromkeys((*_QUICK, *list(FIRST.values())[::18])))


@pytest.mark.parametrize("name", _IN_ORDER)
@pytest.mark.default(2)
def test_arguments_in_order_and_a_dataclass_as_output(run_ranks: RankPool, name: str) -> None:
    assert run_ranks(3, _check_in_order, name) == [""] * 3


SCALED = {
    "flux": "joint_attention_kwargs",
    "sd3": "joint_attention_kwargs",
    "qwen_image": "attention_kwargs",
    "wan": "attention_kwargs",
    "cogvideox": "attention_kwargs",
    "sana": "attention_kwargs",
}


def _check_scale(rank: int, world: int, name: str) -> tuple[str, bool, float]:
    """What differs, whether adapters and nothing else have gradients, and the effect of the scale."""
    from peft import LoraConfig

    model: Any = TINY[name].build()
    model.add_adapter(LoraConfig(r=2, lora_alpha=8, target_modules=["to_q", "to_v"], init_lora_weights=False))
    inputs = {**TINY[name].arguments(), "return_dict": False}
    scaled = {**inputs, SCALED[name]: {"scale": 0.3}}
    found = check_plan(model, scaled, MODES["ring"](world))
    names = [x.name for x in found.gradients]
    model = model.double()
    apply_context_parallel(model, MODES["ring"](world))
    with torch.no_grad():
        effect = max_error(model(**scaled)[0], model(**inputs)[0])
    return "" if found.passed else str(found), bool(names) and all("lora" in x for x in names), effect


@pytest.mark.parametrize("names", [["flux"], [name for name in SCALED if name != "flux"]], ids=["flux", "others"])
@pytest.mark.default("flux")
def test_the_scale_of_a_lora_among_attention_kwargs(run_ranks: RankPool, names: list[str]) -> None:
    for name in names:
        for differing, is_of_adapters, effect in run_ranks(3, _check_scale, name):
            assert not differing, name
            assert is_of_adapters, name
            assert effect > 1e-6, name
