"""CUDA graphs on a GPU: the bits of an eager forward, in every mode, and after everything that a graph must notice."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from torch import Tensor, nn

from lightning_cp import ContextParallelConfig, capture_forward, parallelize_pipeline, unparallelize_pipeline
from lightning_cp.engine.apply import installed_on, parallelize
from lightning_cp.engine.graphs import recorder
from lightning_cp.engine.graphs.forward import GraphedForward
from lightning_cp.pipelines import parallel_pipeline
from lightning_cp.undoable import intercept_calls
from tests.dist.pipelines.test_pipeline_features import _lora
from tests.gpu.echo import echo_world
from tests.pipelines import PIPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIGS = {
    "one rank": ContextParallelConfig(),
    "allgather": ContextParallelConfig(ring_degree=4),
    "alltoall": ContextParallelConfig(ring_degree=4, rotate_method="alltoall"),
    "ulysses": ContextParallelConfig(ulysses_degree=4),
    "unified": ContextParallelConfig(ring_degree=2, ulysses_degree=2),
}
Inputs = dict[str, Any]


def _flux(tokens: int = 18) -> tuple[nn.Module, Callable[[int], Inputs]]:
    sizes: Any = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 32, "num_attention_heads": 4}
    with torch.device("cuda"):
        model: Any = FluxTransformer2DModel(
            **sizes, in_channels=16, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(8, 12, 12)
        )

    def inputs(seed: int, tokens: int = tokens) -> Inputs:
        torch.manual_seed(seed)
        shapes = {"hidden_states": (1, tokens, 16), "encoder_hidden_states": (1, 7, 32), "pooled_projections": (1, 32)}
        shapes |= {"timestep": (1,), "img_ids": (tokens, 3), "txt_ids": (7, 3)}
        return {name: torch.randn(shape, device="cuda").bfloat16() for name, shape in shapes.items()}

    return model.bfloat16().eval(), inputs


def _wan() -> tuple[nn.Module, Callable[[int], Inputs]]:
    sizes: Any = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 2, "ffn_dim": 64, "text_dim": 32}
    with torch.device("cuda"):
        model = WanTransformer3DModel(**sizes, freq_dim=32)

    def inputs(seed: int) -> Inputs:
        torch.manual_seed(seed)
        shapes = {"hidden_states": (1, 16, 3, 6, 6), "encoder_hidden_states": (1, 7, 32)}
        tensors = {name: torch.randn(shape, device="cuda").bfloat16() for name, shape in shapes.items()}
        return {**tensors, "timestep": torch.full((1,), 10.0 * seed, device="cuda").expand(1)}

    return model.bfloat16().eval(), inputs


def _outputs(model: nn.Module, inputs: Callable[[int], Inputs], seeds: range) -> list[Tensor]:
    with torch.no_grad():
        return [model(**inputs(seed), return_dict=False)[0] for seed in seeds]


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> list[GraphedForward]:
    """All graphed forwards that are made."""
    made: list[GraphedForward] = []
    init = GraphedForward.__init__

    def noted(self: GraphedForward, *args: Any) -> None:
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(GraphedForward, "__init__", noted)
    return made


@pytest.mark.parametrize("check_peers", ["sampled", "off"])
@pytest.mark.parametrize("make", [_flux, _wan])
@pytest.mark.parametrize("mode", CONFIGS)
def test_replays_have_the_bits_of_eager_forwards(
    mode: str, make: Any, check_peers: str, graphed: list[GraphedForward]
) -> None:
    with echo_world(4, rank=1):
        model, inputs = make()
        parallelize(model, CONFIGS[mode], check_peers=check_peers)
        expected = _outputs(model, inputs, range(6))
        undo = capture_forward(model)
        found = _outputs(model, inputs, range(6))
        assert graphed[0].num_graphs == 1
        assert graphed[0].num_bytes > 0
        assert all(x.isfinite().all() for x in expected)
        for eager, replayed in zip(expected, found, strict=True):
            assert torch.equal(eager, replayed)
        undo()
        assert torch.equal(_outputs(model, inputs, range(1))[0], expected[0])


def test_compiled_blocks_are_captured(graphed: list[GraphedForward]) -> None:
    with echo_world(4, rank=1):
        model: Any
        model, inputs = _flux()
        parallelize(model, CONFIGS["ulysses"])
        for blocks in (model.transformer_blocks, model.single_transformer_blocks):
            for block in blocks:
                block.compile(fullgraph=True)
        expected = _outputs(model, inputs, range(5))
        capture_forward(model)
        found = _outputs(model, inputs, range(5))
        assert graphed[0].num_graphs == 1
        assert all(map(torch.equal, expected, found))


def test_a_capture_that_fails_leaves_a_usable_gpu(graphed: list[GraphedForward], caplog: Any) -> None:
    model: Any
    model, inputs = _flux()
    parallelize(model, CONFIGS["one rank"])
    expected = _outputs(model, inputs, range(5))
    norm = model.norm_out.forward

    def reads_a_value(x: Tensor, emb: Tensor) -> Tensor:
        return norm(x, emb) + 0 * x[:, :, :1].sum().item()

    model.norm_out.forward = reads_a_value
    expected = _outputs(model, inputs, range(5))
    capture_forward(model)
    assert all(map(torch.equal, expected, _outputs(model, inputs, range(5))))
    assert graphed[0].num_graphs == 0
    assert "run without CUDA graphs" in caplog.text
    assert torch.randn(3, device="cuda").isfinite().all(), "random numbers outside of the graph"
    other, others = _wan()
    parallelize(other, CONFIGS["one rank"])
    before = _outputs(other, others, range(5))
    capture_forward(other)
    assert all(map(torch.equal, before, _outputs(other, others, range(5))))
    assert graphed[1].num_graphs == 1


def _draw(pipe: Any, *, seed: int = 1, steps: int = 5, **changed: Any) -> Tensor:
    inputs = {**PIPES["flux"].inputs(), "num_inference_steps": steps, "output_type": "latent", **changed}
    return pipe(**inputs, generator=torch.Generator("cpu").manual_seed(seed)).images  # type: ignore[no-any-return]


def _halve(pipe: Any, step: int, time: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"latents": kwargs["latents"] / 2 if step == 2 else kwargs["latents"]}


def _two_loras(pipe: Any) -> None:
    _lora(pipe, "one", 1)
    _lora(pipe, "two", 2)


# what is done to the pipeline, and then called, one after another
JOURNEY: tuple[tuple[str, Callable[[Any], object], dict[str, Any]], ...] = (
    ("first prompt", lambda pipe: None, {}),
    ("second prompt", lambda pipe: None, {"prompt": "two green birds fly"}),
    ("another size", lambda pipe: None, {"height": 20, "width": 28}),
    ("a callback", lambda pipe: None, {"callback_on_step_end": _halve}),
    ("two adapters", _two_loras, {}),
    ("one of them", lambda pipe: pipe.set_adapters("one"), {}),
    ("the other", lambda pipe: pipe.set_adapters("two"), {}),
    ("half of it", lambda pipe: pipe.set_adapters("two", 0.5), {}),
    ("scale of the call", lambda pipe: None, {"joint_attention_kwargs": {"scale": 0.25}}),
    ("swapped in place", lambda pipe: _lora_in_place(pipe, 3), {}),
    ("none", lambda pipe: pipe.unload_lora_weights(), {}),
    ("weights moved", lambda pipe: pipe.to("cpu") and pipe.to("cuda"), {}),
    ("weights in place", lambda pipe: pipe.transformer.proj_out.weight.data.mul_(0.5), {}),
)


def _lora_in_place(pipe: Any, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for name, x in pipe.transformer.named_parameters():
        if "lora_B.two" in name:
            x.data.copy_(torch.randn(x.shape, generator=draw) / 4)


def _journey(graphs: bool) -> tuple[dict[str, Tensor], list[int]]:
    torch.manual_seed(0)
    pipe = PIPES["flux"].make().to("cuda")
    pipe.set_progress_bar_config(disable=True)
    parallelize_pipeline(pipe, ContextParallelConfig(), graphs=graphs)
    state = parallel_pipeline(pipe)
    assert state is not None
    found, counts = {}, []
    for name, change, changed in JOURNEY:
        change(pipe)
        for _ in range(2):
            found[name] = _draw(pipe, **changed)
        counts.append(sum(one.num_graphs for one in state.graphs.values()))
    unparallelize_pipeline(pipe)
    found["undone"] = _draw(pipe)
    return found, counts


def test_a_pipeline_notices_all_that_changes() -> None:
    """Prompts, sizes, callbacks, adapters and weights: the same bits with graphs as without."""
    expected, _ = _journey(False)
    found, counts = _journey(True)
    assert [name for name, x in expected.items() if not torch.equal(x, found[name])] == []
    assert counts[0] == 1
    assert all(counts)


@pytest.mark.parametrize(("tokens", "width", "captures"), [(64, 64, True), (16384, 4096, False)])
def test_auto_captures_where_the_host_is_the_limit(tokens: int, width: int, captures: bool, caplog: Any) -> None:
    caplog.set_level("INFO", "lightning_cp")
    sizes: Any = {"num_attention_heads": width // 64, "attention_head_dim": 64, "num_layers": 4, "ffn_dim": 2 * width}
    with torch.device("cuda"):
        model = WanTransformer3DModel(**sizes, text_dim=32, freq_dim=32).bfloat16().eval()
        side = int((4 * tokens) ** 0.5)
        inputs = {"hidden_states": torch.randn(1, 16, 1, side, side).bfloat16(), "timestep": torch.full((1,), 10.0)}
        inputs["encoder_hidden_states"] = torch.randn(1, 7, 32).bfloat16()
    parallelize(model, CONFIGS["one rank"])
    one = GraphedForward(installed_on(model), "auto", cache(recorder.recorder_for))  # type: ignore[arg-type]
    intercept_calls(model, one.run)
    outputs = _outputs(model, lambda _: inputs, range(6))
    assert one.num_graphs == captures, caplog.text
    assert all(torch.equal(x, outputs[0]) for x in outputs)
