"""Feed-forwards in tiles, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel, selective_checkpoint
from lightning_cp.engine.apply import installed_on
from lightning_cp.engine.check import KeepFloat64
from lightning_cp.engine.tiles import feed_forwards
from tests.models import FIRST, TINY

# Classes in which no feed-forward is a module of its own that computes each token alone.
WITHOUT = {
    "MiniMaxMusic3Transformer1DModel": "in the block's forward",
    "PRXTransformer2DModel": "in the block's forward",
    "SanaControlNetModel": "convolutions",
    "SanaTransformer2DModel": "convolutions",
    "SanaVideoTransformer3DModel": "convolutions",
}
ONE = ContextParallelConfig()


def results(model: nn.Module, inputs: dict[str, Any], wanted: str = "hidden_states") -> dict[str, Tensor]:
    """The output, and the gradients of an argument and of all parameters, by name."""
    arguments = {k: v.clone().requires_grad_() if k == wanted else v for k, v in inputs.items()}
    model.zero_grad()
    torch.manual_seed(3)
    output = model(**arguments, return_dict=False)[0]
    output = output[0] if isinstance(output, (list, tuple)) else output
    output.square().mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    x = arguments.get(wanted)
    return {"output": output.detach(), **grads, **({"input": x.grad} if x is not None else {})}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        limit = 1e-15 if name == "output" else 1e-13
        assert (found[name] - value).abs().max() <= limit * max(1.0, float(value.abs().max())), name


def add_adapters(model: Any) -> None:
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["net.0.proj", "net.2", "to_q"], init_lora_weights="gaussian"))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    model.double()


def fully(model: Any) -> None:
    model.enable_gradient_checkpointing()


def selectively(model: Any) -> None:
    model.enable_gradient_checkpointing(gradient_checkpointing_func=selective_checkpoint)


@pytest.mark.parametrize(("checkpointing", "adapters"), [(fully, False), (selectively, True), (None, True)])
@pytest.mark.default(1)
def test_tiles_change_no_result(checkpointing: Callable[..., None] | None, adapters: bool) -> None:
    model, inputs = TINY["wan"].build().train(), TINY["wan"].arguments()
    if adapters:
        add_adapters(model)
    names = list(model.state_dict())
    expected = results(model, inputs)
    if checkpointing is not None:
        checkpointing(model)
    apply_context_parallel(model, ONE, mlp_tiles=3)
    check_equal(results(model, inputs), expected)
    check_equal(results(copy.deepcopy(model), inputs), expected)
    assert list(model.state_dict()) == names
    remove_context_parallel(model)
    assert not any("forward" in vars(inner) for inner in model.modules())
    check_equal(results(model, inputs), expected)


def test_a_feed_forward_is_exact_alone() -> None:
    """Output and input gradient to 1e-15, weights to 1e-13; hooks of parameters run once; one tile at a time."""
    from diffusers.models.attention import FeedForward

    from lightning_cp.engine.tiles import tile

    torch.manual_seed(0)
    plain = FeedForward(16, inner_dim=64).double()
    tiled, seen = copy.deepcopy(plain), []
    tile(tiled, 4)
    tiled.net[0].register_forward_hook(lambda _, args, out: seen.append(out.shape[1]))
    calls: list[Tensor] = []
    tiled.net[2].weight.register_hook(lambda g: calls.append(g))
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, output = plain(a), tiled(b)
    grad = torch.randn_like(output)
    expected.backward(grad)
    output.backward(grad)
    torch.testing.assert_close(output, expected, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(b.grad, a.grad, rtol=1e-15, atol=1e-15)
    for p, q in zip(plain.parameters(), tiled.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-13, atol=1e-13)
    assert seen == [4, 4, 4, 1, 1, 4, 4, 4]
    assert len(calls) == 1
    with torch.no_grad():
        assert torch.equal(tiled(x), output)
    dual = torch.func.jvp(tiled, (x,), (x,))[1]
    torch.testing.assert_close(dual, torch.func.jvp(plain, (x,), (x,))[1])


def test_auto_limits_a_tile_to_the_size_of_the_input() -> None:
    """SD3's feed-forward is 4 times as wide as its input."""
    model = TINY[FIRST["SD3Transformer2DModel"]].build()
    apply_context_parallel(model, ONE, mlp_tiles="auto")
    sizes: list[tuple[int, ...]] = []
    ff: Any = model.transformer_blocks[0].ff  # type: ignore[union-attr,index]
    ff.net[0].register_forward_hook(lambda _, args, out: sizes.append((args[0].numel(), out.numel())))
    with torch.no_grad():
        model(**TINY[FIRST["SD3Transformer2DModel"]].arguments())
    assert len(sizes) == 4
    assert all(out <= 1.2 * sum(x for x, _ in sizes) for _, out in sizes)  # 1.2: the number of tokens is odd


def test_dropout_drops_the_same_in_backward() -> None:
    """The gradient agrees with a difference of losses that are computed with the same seed."""
    from diffusers.models.attention import FeedForward

    from lightning_cp.engine.tiles import tile

    module = FeedForward(16, inner_dim=64, dropout=0.3).double().train()
    tile(module, 3)
    weight, x, losses = module.net[2].weight, torch.randn(2, 13, 16, dtype=torch.float64), []
    torch.manual_seed(3)
    module(x).square().mean().backward()
    direction, step = torch.randn_like(weight), 1e-6
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * step * direction
            torch.manual_seed(3)
            losses.append(float(module(x).square().mean()))
            weight -= sign * step * direction
    slope = (losses[0] - losses[1]) / (2 * step)
    assert slope == pytest.approx(float((weight.grad * direction).sum()), rel=1e-6)


@pytest.mark.full
def test_dropout_drops_the_same_with_checkpointing() -> None:
    model, inputs = TINY["wan"].build().train(), TINY["wan"].arguments()
    for inner in model.modules():
        if isinstance(inner, nn.Dropout):
            inner.p = 0.3
    apply_context_parallel(model, ONE, mlp_tiles=3)
    expected = results(model, inputs)
    fully(model)
    check_equal(results(model, inputs), expected)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_autocast_is_restored_in_backward() -> None:
    model, inputs = TINY["wan"].build().float(), TINY["wan"].arguments()
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}

    def run() -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(**inputs, return_dict=False)[0]
        model.zero_grad()
        output.float().square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = run()
    apply_context_parallel(model, ONE, mlp_tiles=2)
    found = torch.cat([grad.flatten() for grad in run().values()])
    whole = torch.cat([grad.flatten() for grad in expected.values()])
    assert (found - whole).norm() <= 0.005 * whole.norm()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_which_classes_are_tiled() -> None:
    """All but `WITHOUT`; a feed-forward that is tiled exactly computes each token alone."""
    for kind in WITHOUT:
        with pytest.raises(ValueError, match="no feed-forward"):
            apply_context_parallel(TINY[FIRST[kind]].build(), ONE, mlp_tiles=3)
    for kind in sorted({*FIRST} - {*WITHOUT})[::6]:
        tiny = TINY[FIRST[kind]]
        model, inputs = tiny.build(), tiny.arguments()
        apply_context_parallel(model, ONE)
        with torch.no_grad(), KeepFloat64():
            expected = _tensors(model(**inputs))
        remove_context_parallel(model)
        apply_context_parallel(model, ONE, mlp_tiles=3)
        assert feed_forwards(model, installed_on(model).model_plan), kind
        with torch.no_grad(), KeepFloat64():
            found = _tensors(model(**inputs))
        for a, b in zip(found, expected, strict=True):
            assert (a - b).abs().max() <= 1e-13 * max(1.0, float(b.abs().max())), kind


def _tensors(value: Any) -> list[Tensor]:
    from lightning_cp.nest import of_type

    return list(of_type(Tensor, dict(value) if hasattr(value, "keys") else value))


def test_bad_values_are_refused() -> None:
    for tiles in (0, -1, 1.5, True, "all"):
        with pytest.raises(ValueError, match=rf"mlp_tiles={tiles!r} must be one of None, auto or a whole number"):
            apply_context_parallel(TINY["wan"].build(), ONE, mlp_tiles=tiles)  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks() -> None:
    """Blocks are compiled around their feed-forwards; fullgraph is refused with the reason."""
    model, inputs = TINY["wan"].build(), TINY["wan"].arguments()
    expected = results(model, inputs)
    apply_context_parallel(model, ONE, mlp_tiles=3)
    compile_blocks = partial(model.compile_repeated_blocks, backend="aot_eager")
    compile_blocks()
    check_equal(results(model, inputs), expected)
    torch.compiler.reset()
    compile_blocks(fullgraph=True)
    with pytest.raises(Exception, match="mlp_tiles computes feed-forwards outside of graphs"):
        results(model, inputs)
