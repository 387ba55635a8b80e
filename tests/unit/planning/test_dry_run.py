"""Dry runs: repeated blocks equal the full trace, operations equal formulas by hand, errors, and the speed."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from torch import Tensor, nn

from lightning_cp import ContextParallelInput, ContextParallelOutput
from lightning_cp.device_profile import CPU, DeviceProfile
from lightning_cp.engine.apply import NoPlanError
from lightning_cp.finetune.adapters.lora import add_lora
from lightning_cp.finetune.settings import LoraSettings
from lightning_cp.planning.dry_run import UntraceableError, dry_run
from lightning_cp.planning.recording import StepSettings, adamw, training_loss
from lightning_cp.planning.step import Compute, Layout
from lightning_cp.plans import Plan, split
from lightning_cp.recipes.benchmarks.trace import read_trace, record_trace
from tests.dist.plain import PLAIN_PLAN, Block, Plain

_GPU = DeviceProfile("H100", "cuda")
_FLUX_TINY = {
    "in_channels": 4,
    "num_layers": 6,
    "num_single_layers": 7,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}
_FLUX_DEV = {
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}
_WAN_14B = {"num_attention_heads": 40, "attention_head_dim": 128, "num_layers": 40, "ffn_dim": 13824, "text_dim": 4096}


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _flux(image: int, text: int, config: dict[str, Any], width: int) -> dict[str, Any]:
    guidance = {"guidance": _meta(1)} if config.get("guidance_embeds") else {}
    return guidance | {
        "hidden_states": _meta(1, image, width),
        "encoder_hidden_states": _meta(1, text, config["joint_attention_dim"]),
        "pooled_projections": _meta(1, config["pooled_projection_dim"]),
        "timestep": _meta(1),
        "img_ids": _meta(image, 3),
        "txt_ids": _meta(text, 3),
    }


_TINY = partial(FluxTransformer2DModel, **_FLUX_TINY)
_TINY_INPUTS = _flux(30, 7, _FLUX_TINY, 4)


@pytest.mark.parametrize(
    ("checkpointing", "device", "sharded"),
    [("none", CPU, False), ("none", _GPU, True), ("full", _GPU, False), ("selective", CPU, True)],
)
@pytest.mark.full
def test_repeated_blocks_equal_the_full_trace(checkpointing: Any, device: DeviceProfile, sharded: bool) -> None:
    layout = Layout(ring=2, ulysses=2, checkpointing=checkpointing, sharded=sharded)
    short, full = (dry_run(_TINY, _TINY_INPUTS, layout, device=device, every_block=x) for x in (False, True))
    assert len(short.parts) < len(full.parts)
    assert short.peak == full.peak
    assert short.sent_bytes() == full.sent_bytes()
    assert short.flops == full.flops
    assert short.calls == pytest.approx(full.calls, rel=0.01)  # FSDP2 looks at all weights in one step
    assert sharded or list(short.events()) == list(full.events())


def test_flops_of_a_block_equal_a_formula() -> None:
    dim, tokens = 64, 37
    step = dry_run(_TINY, _TINY_INPUTS, Layout(), StepSettings("sample"), device=_GPU)
    (block,) = (part for part in step.parts if part.name == "block 4")  # of the second kind, in the middle
    found = {x.name: 0 for x in block.events if isinstance(x, Compute)}
    for event in block.events:
        if isinstance(event, Compute):
            found[event.name] += event.flops
    # modulation of one vector; q, k, v and the first layer of the MLP (4 dim); the output of attention and MLP
    linear = 2 * dim * 3 * dim + 2 * tokens * dim * (3 + 4) * dim + 2 * tokens * 5 * dim * dim
    assert sum(count for name, count in found.items() if name.endswith(("::mm", "::addmm"))) == linear
    assert sum(count for name, count in found.items() if "attention" in name) == 4 * tokens * tokens * dim


@pytest.mark.full
def test_the_device_is_that_of_the_profile() -> None:
    def kernels(device: DeviceProfile) -> set[str]:
        step = dry_run(_TINY, _TINY_INPUTS, Layout(ring=2), device=device)
        return {x.name for x in step.events() if isinstance(x, Compute) and "attention" in x.name}

    assert kernels(_GPU) == {f"aten::_scaled_dot_product_cudnn_attention{x}" for x in ("", "_backward")}
    assert kernels(CPU) == {f"aten::_scaled_dot_product_flash_attention_for_cpu{x}" for x in ("", "_backward")}


@pytest.mark.full
def test_the_host_reads_step_counters_without_kernels() -> None:
    step = dry_run(_TINY, _TINY_INPUTS, Layout(), device=_GPU)
    (part,) = (part for part in step.parts if part.name == "optimizer")
    assert len(part.events) < 20  # for all weights at once


@pytest.mark.full
def test_gathered_weights_are_no_activations() -> None:
    """The buffer that FSDP2 gathers a block into."""
    step = dry_run(_TINY, _TINY_INPUTS, Layout(ring=2, ulysses=2, sharded=True), StepSettings("sample"), device=_GPU)
    block = _TINY().transformer_blocks[0]
    weights = 2 * sum(x.numel() for x in block.parameters())
    assert weights < step.peak["buffers"] < 3 * weights
    assert step.peak["activations"] < 2 * weights


class _Reads(Plain):
    """A model that needs the value of an input."""

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        (output,) = super().forward(x, return_dict)
        return (output * float(x.sum()),)


def test_errors_name_the_cause() -> None:
    with pytest.raises(ValueError, match="reads values of a tensor"):
        dry_run(_Reads, {"x": _meta(2, 8, 16)}, Layout(ring=2), plan=PLAIN_PLAN)
    with pytest.raises(UntraceableError, match=r"fails with these inputs: TypeError: .* 'y'"):
        dry_run(_Reads, {"y": _meta(2, 8, 16)}, Layout(ring=2), plan=PLAIN_PLAN)
    with pytest.raises(NoPlanError, match="no plan is registered"):
        dry_run(_Reads, {"x": _meta(2, 8, 16)}, Layout(ring=2))
    with pytest.raises(ValueError, match="ulysses_degree=8 must be at most the number of query heads, 4"):
        dry_run(_TINY, _TINY_INPUTS, Layout(ulysses=8))
    with pytest.raises(ValueError, match="rank=2 must be"):
        dry_run(_TINY, _TINY_INPUTS, Layout(ring=2), rank=2)


class _Counts(Plain):
    """A model that counts its six blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(16, 4) for _ in range(6)])

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        for index in range(6):
            x = self.blocks[index](x)
        return (self.proj_out(x),)


class _Shares(_Counts):
    """A model whose blocks have one module in common."""

    forward = Plain.forward

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.out = self.blocks[0].out


class _OfEach(_Counts):
    """A model with a module for each block, outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList([nn.Linear(16, 16) for _ in self.blocks])

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        for block, before in zip(self.blocks, self.before):
            x = block(before(x))
        return (self.proj_out(x),)


@pytest.mark.parametrize("kind", [_Shares, _OfEach])
@pytest.mark.default(1)
def test_blocks_that_do_not_count_for_others_are_all_traced(kind: type[nn.Module]) -> None:
    plan = Plan(blocks={"blocks": {"x": split(1, "image")}}, gather={"proj_out": split(1, "image")})
    layout, inputs = Layout(ring=2, sharded=True), {"x": _meta(2, 8, 16)}
    short, full = (dry_run(kind, inputs, layout, plan=plan, every_block=x) for x in (False, True))
    assert (short.peak, short.flops, short.sent_bytes()) == (full.peak, full.flops, full.sent_bytes())


class _Fails(Plain):
    """A model that refuses its inputs."""

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        raise ValueError("odd")


def test_an_error_of_the_model_is_explained() -> None:
    with pytest.raises(ValueError, match=r"fails with these inputs, in test_dry_run.py, line \d+: .*: ValueError: odd"):
        dry_run(_Fails, {"x": _meta(2, 8, 16)}, Layout(ring=2), plan=PLAIN_PLAN)


class _OneBlock(nn.Module):
    """A model whose plan has no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.proj_out = Block(16, 4), nn.Linear(16, 3)

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        return (self.proj_out(self.block(x)),)


def test_a_model_that_needs_each_block_is_traced_whole() -> None:
    plan = Plan(blocks={"blocks": {"x": split(1, "image")}}, gather={"proj_out": split(1, "image")})
    step = dry_run(_Counts, {"x": _meta(2, 8, 16)}, Layout(ring=2), plan=plan)
    assert [x.repeats for x in step.parts if x.name.startswith("block")] == [1] * 12


@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_without_blocks_is_traced(sharded: bool) -> None:
    plan = {
        "": {"x": ContextParallelInput(split_dim=1, expected_dims=3)},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }
    step = dry_run(_OneBlock, {"x": _meta(2, 8, 16)}, Layout(ring=2, sharded=sharded), plan=plan)
    assert step.flops > 0
    assert step.peak["weights"] > 0


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_peak_is_that_of_the_profiler(checkpointing: Any) -> None:
    inputs = {name: torch.randn(x.shape) for name, x in _TINY_INPUTS.items()}
    model = _TINY()
    if checkpointing == "full":
        model.enable_gradient_checkpointing()
    optimizer = adamw(list(model.parameters()))

    def step() -> None:
        training_loss(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # the state of the optimizer
    measured = read_trace(record_trace(step)).peak_bytes
    fake = {name: x.to("meta") for name, x in inputs.items()}
    dry = dry_run(_TINY, fake, Layout(checkpointing=checkpointing), dtype=torch.float32)
    given = sum(x.numel() * x.element_size() for x in inputs.values())
    assert dry.peak_bytes - dry.peak["weights"] - dry.peak["optimizer"] - given == pytest.approx(measured, rel=0.05)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "lora"), [("flux", None), ("wan", LoraSettings(rank=16, targets=["to_q", "to_k", "to_v"]))]
)
def test_large_models_are_traced_within_20_seconds(model: str, lora: LoraSettings | None) -> None:
    if model == "flux":
        build: Any = partial(FluxTransformer2DModel, **_FLUX_DEV)
        inputs, layout = _flux(4096, 512, _FLUX_DEV, 64), Layout(ring=2, ulysses=2)
    else:
        build = partial(WanTransformer3DModel, **_WAN_14B)
        layout = Layout(ring=2, ulysses=2, checkpointing="full")
        inputs = {
            "hidden_states": _meta(1, 16, 21, 90, 160),  # 75,600 tokens
            "encoder_hidden_states": _meta(1, 512, 4096),
            "timestep": _meta(1, dtype=torch.int64),
        }
    started = time.process_time()
    step = dry_run(build, inputs, layout, device=_GPU, adapt=lora and partial(add_lora, settings=lora))
    assert time.process_time() - started < 20
    assert step.peak["weights"] > 20 << 30


def test_a_model_without_latents_among_its_arguments_has_a_loss() -> None:
    class Tokens(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids)

    model = Tokens(3, 2)
    loss = training_loss(model, {"ids": torch.arange(3)})
    assert float(loss.detach()) == pytest.approx(float(model.weight.detach().square().mean()))
