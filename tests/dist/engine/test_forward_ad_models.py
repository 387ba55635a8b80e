"""Forward derivatives of models, and MeanFlow's loss, which trains by them, equal those of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_unflatten

from lightning_cp import apply_context_parallel
from tests.dist.compare import averaged, nothing_narrowed
from tests.dist.lightning_ranks import STRATEGIES, fabric_of, whole
from tests.harness import RankPool
from tests.models import TINY
from tests.models.modes import MODES

_MODELS = ("wan", "flux", "sana", "sana_video", "hunyuan_dit", "stable_audio3")  # softmax, linear, margins, gathers
_LIMIT = 1e-10


def _tangents(model: nn.Module, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """All outputs, flat, and their tangents for tangents of all inputs but masks."""
    given, spec = tree_flatten_with_path(arguments)
    leaves = [x for _, x in given]
    moved = [
        i
        for i, (path, x) in enumerate(given)
        if isinstance(x, Tensor) and x.is_floating_point() and "mask" not in str(path)
    ]
    generator = torch.Generator().manual_seed(3)
    tangents = tuple(torch.randn(leaves[i].shape, generator=generator, dtype=torch.float64) for i in moved)

    def call(*changed: Tensor) -> Tensor:
        values = list(leaves)
        for i, x in zip(moved, changed, strict=True):
            values[i] = x
        outputs = model(**tree_unflatten(values, spec), return_dict=False)
        return torch.cat([x.flatten() for x in tree_leaves(outputs) if isinstance(x, Tensor)])

    # PyTorch's own flash attention has no forward derivative.
    with nothing_narrowed(), sdpa_kernel(SDPBackend.MATH):
        out, change = torch.func.jvp(call, tuple(leaves[i] for i in moved), tangents)
    return out.detach(), change.detach()


def _models(rank: int, world: int, mode: str) -> list[str]:
    wrong = []
    for name in _MODELS:
        tiny = TINY[name]
        model, arguments = tiny.build(), tiny.arguments()
        expected = _tangents(model, arguments)
        assert expected[1].abs().max() > 0.1
        apply_context_parallel(model, MODES[mode](world))
        for call in range(4):  # peers are compared in full in the first two, by samples in the others
            model.requires_grad_(call % 2 == 0)
            found = _tangents(model, arguments)
            errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
            if not max(errors) < _LIMIT:
                wrong.append(f"{name}, call {call}: {errors}")
    return wrong


@pytest.mark.full
@pytest.mark.parametrize(("world", "mode"), [(4, "unified"), (3, "rotation")])
def test_tangents_of_models_are_those_of_one_process(run_ranks: RankPool, world: int, mode: str) -> None:
    wrong = [line for lines in run_ranks(world, _models, mode, timeout_s=120) for line in lines]
    assert not wrong, "\n".join(wrong)


# The transformer's average velocity: of noisy samples [b, ...] at time t [b], over the time since r [b].
Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]


def meanflow_loss(
    velocity: Velocity, data: Tensor, noise: Tensor, times: tuple[Tensor, Tensor], *, way: str = "torch.func"
) -> Tensor:
    """Compute the loss of MeanFlow (Geng et al., arXiv:2505.13447, algorithm 1).

    Args:
        data, noise: [b, ...]. times: r and t, [b] each, r <= t. way: "torch.func" or "forward_ad".
    """
    r, t = times
    span, at = ((x).view(-1, *[1] * (data.ndim - 1)) for x in (t - r, t))
    noisy, along = (1 - at) * data + at * noise, noise - data
    tangents = (along, torch.zeros_like(r), torch.ones_like(t))
    if way == "torch.func":
        value, change = torch.func.jvp(velocity, (noisy, r, t), tangents)
    else:
        with forward_ad.dual_level():
            duals = (forward_ad.make_dual(x, y) for x, y in zip((noisy, r, t), tangents, strict=True))
            value, change = forward_ad.unpack_dual(velocity(*duals))
    return (value - (along - span * change).detach()).square().mean()


def velocity_of(model: Callable[..., Any], arguments: dict[str, Any]) -> Velocity:
    """A tiny transformer as a `Velocity`: the text is shifted by the span, since it has no input for it."""

    def velocity(x: Tensor, r: Tensor, t: Tensor) -> Tensor:
        text = arguments["encoder_hidden_states"] + (t - r).view(-1, 1, 1)
        given = {**arguments, "hidden_states": x, "encoder_hidden_states": text, "timestep": t}
        found: Tensor = model(**given, return_dict=False)[0]
        return found

    return velocity


def batch(arguments: dict[str, Any], step: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Data, noise and times of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    x = arguments["hidden_states"]
    data, noise = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(2))
    times = torch.rand(2, x.shape[0], generator=generator, dtype=x.dtype).sort(0).values
    return data, noise, (times[0], times[1])


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([whole(parameter.detach()).flatten().double() for parameter in model.parameters()])


def _train(model: Any, name: str, world: int = 1, fabric: Any = None, way: str = "torch.func") -> Tensor:
    """The weights after a few steps of MeanFlow, in the model's dtype."""
    dtype = next(model.parameters()).dtype
    arguments = {key: x.to(dtype) if x.is_floating_point() else x for key, x in TINY[name].arguments().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        with nothing_narrowed() if dtype == torch.float64 else nullcontext(), sdpa_kernel(SDPBackend.MATH):
            loss = meanflow_loss(velocity_of(model, arguments), *batch(arguments, step), way=way)
            loss.backward() if fabric is None else fabric.backward(loss)
        if fabric is None and world > 1:
            averaged({key: p.grad for key, p in model.named_parameters()}, world)
        optimizer.step()
    return _weights(model)


def _meanflow(rank: int, world: int, name: str, mode: str) -> float:
    start, model = _weights(TINY[name].build()), TINY[name].build()
    expected = _train(TINY[name].build(), name)
    apply_context_parallel(model, MODES[mode](world))
    error = (_train(model, name, world) - expected).abs().max()
    return float(error / (expected - start).abs().max())


@pytest.mark.parametrize(("name", "mode"), [("wan", "rotation"), ("flux", "ring")])
@pytest.mark.default(1)
def test_meanflow_trains_as_in_one_process(run_ranks: RankPool, mode: str, name: str) -> None:
    assert max(run_ranks(3, _meanflow, name, mode, timeout_s=120)) < 1e-9


def _meanflow_under_fabric(rank: int, world: int, kind: str, way: str, settings: dict[str, Any]) -> float:
    sharded = kind == "cp_fsdp"  # Lightning's has no float64
    dtype, precision = (torch.float32, "32-true") if sharded else (torch.float64, "64-true")
    start, expected = _weights(TINY["wan"].build()), _train(TINY["wan"].build().to(dtype), "wan")
    fabric = fabric_of(rank, world, STRATEGIES["fabric", kind](ring=world, **settings), precision=precision)
    error = (_train(TINY["wan"].build().to(dtype), "wan", fabric=fabric, way=way) - expected).abs().max()
    return float(error / (expected - start).abs().max())


@pytest.mark.parametrize(
    ("world", "kind", "way", "settings"),
    [
        (2, "cp", "torch.func", {"broadcast_buffers": False}),
        (3, "cp", "forward_ad", {}),
        (3, "cp_fsdp", "torch.func", {}),
    ],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.default(1)
def test_meanflow_trains_under_fabric_as_in_one_process(
    run_ranks: RankPool, world: int, kind: str, way: str, settings: dict[str, Any]
) -> None:
    errors = run_ranks(world, _meanflow_under_fabric, kind, way, settings, init=False)
    assert max(errors) < (1e-3 if kind == "cp_fsdp" else 1e-9)
