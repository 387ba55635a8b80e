"""Forward derivatives of attention in one process, and errors where a derivative would be zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from lightning_cp import ContextParallelConfig, context_parallel_attention
from lightning_cp.attention import attend_across
from lightning_cp.attention.call import settings_of
from lightning_cp.errors import KernelError
from lightning_cp.kernels.math import MathKernel
from lightning_cp.mesh.groups import SINGLE_RANK
from tests.reference import max_error, softmax_attention

CONFIG = ContextParallelConfig()


def _inputs(*, frozen: bool = False, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor]]:
    """q, k and v, and their tangents."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(2, 5, 4, 6), (2, 7, 2, 6), (2, 7, 2, 6)] * 2
    found = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_(not frozen) for x in found[:3]], found[3:]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return context_parallel_attention(q, k, v, mask, enable_gqa=True, parallel_config=CONFIG, return_lse=True)


def _loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attend(q, k, v)[0].square().sum()


@pytest.mark.parametrize("frozen", [True, False])
def test_tangents_are_exact_at_every_call(frozen: bool) -> None:
    inputs, tangents = _inputs(frozen=frozen)
    expected = torch.func.jvp(softmax_attention, tuple(inputs), tuple(tangents))
    for _ in range(4):
        found = torch.func.jvp(_attend, tuple(inputs), tuple(tangents))
        for mine, theirs in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
            assert max_error(mine, theirs) < 1e-12


def test_tangents_are_those_of_pytorchs_own_attention() -> None:
    (q, *_), (dq, *_) = _inputs()

    def plain(x: Tensor) -> Tensor:
        by_head = x.transpose(1, 2)
        return F.scaled_dot_product_attention(by_head, by_head, by_head.sin(), is_causal=True).transpose(1, 2)

    def parallel(x: Tensor) -> Tensor:
        return context_parallel_attention(x, x, x.sin(), is_causal=True, parallel_config=CONFIG)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.func.jvp(plain, (q,), (dq,))
    found = torch.func.jvp(parallel, (q,), (dq,))
    assert max(max_error(mine, theirs) for mine, theirs in zip(found, expected, strict=True)) < 1e-12


def test_tangents_do_not_depend_on_the_size_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, tangents = _inputs()
    mask = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)) > 0.3

    def attend(*x: Tensor) -> tuple[Tensor, Tensor]:
        return _attend(*x, mask)

    def causal(x: Tensor) -> Tensor:
        return context_parallel_attention(x, x, x, is_causal=True, parallel_config=CONFIG)

    calls: list[tuple[Callable[..., object], list[Tensor], list[Tensor]]] = [
        (attend, inputs, tangents),
        (causal, inputs[:1], tangents[:1]),
    ]
    whole = [torch.func.jvp(call, tuple(x), tuple(t))[1] for call, x, t in calls]
    monkeypatch.setattr("lightning_cp.kernels.math._SCORES_AT_A_TIME", 2 * 2 * 4 * 7)  # two queries
    blocks = [torch.func.jvp(call, tuple(x), tuple(t))[1] for call, x, t in calls]
    torch.testing.assert_close(blocks, whole, rtol=0, atol=1e-13)


def test_a_loss_that_detaches_the_tangent_has_exact_gradients() -> None:
    inputs, tangents = _inputs()

    def gradients(attend: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        (out, _), (change, _) = torch.func.jvp(attend, tuple(inputs), tuple(tangents))
        return torch.autograd.grad((out - change.detach()).square().sum(), inputs)

    found, expected = gradients(_attend), gradients(softmax_attention)
    assert max(max_error(mine, theirs) for mine, theirs in zip(found, expected, strict=True)) < 1e-12


def test_tangents_in_bfloat16_are_as_exact_as_bfloat16_is() -> None:
    inputs, tangents = _inputs(dtype=torch.bfloat16)
    _, exact = torch.func.jvp(softmax_attention, tuple(x.double() for x in inputs), tuple(x.double() for x in tangents))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, found = torch.func.jvp(_attend, tuple(inputs), tuple(tangents))
    assert found[0].dtype == torch.bfloat16
    assert found[1].dtype == torch.float32
    assert max_error(found[0], exact[0]) < 0.03
    assert max_error(found[1], exact[1]) < 0.03  # a tangent in bfloat16 products is off by ten times that


def test_a_kernel_without_tangents_is_refused_by_name() -> None:
    (q, *_), (dq, *_) = _inputs()

    def attend(kernel: str) -> Callable[[Tensor], object]:
        name, head_dim = SINGLE_RANK.name, q.shape[-1]
        settings = settings_of(head_dim, causal=False, scale=None, groups=name, config=CONFIG, kernel=kernel)
        return lambda x: attend_across(x, x, x, None, settings, lengths=([], []))

    with pytest.raises(KernelError, match=r"kernel='flash' has no forward derivative.*use kernel='auto' or 'math'"):
        torch.func.jvp(attend("flash"), (q,), (dq,))
    auto, named = (torch.func.jvp(attend(kernel), (q,), (dq,))[1] for kernel in ("auto", MathKernel.name))
    torch.testing.assert_close(auto, named, rtol=0, atol=1e-12)


def test_a_mask_with_a_tangent_is_refused() -> None:
    inputs, _ = _inputs()
    mask = torch.zeros(2, 7, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="attn_mask has a tangent"):
        torch.func.jvp(lambda m: _attend(*inputs, m), (mask,), (mask + 1,))


def test_a_gradient_through_a_tangent_is_refused() -> None:
    inputs, tangents = _inputs()
    _, (change, _) = torch.func.jvp(_attend, tuple(inputs), tuple(tangents))
    with pytest.raises(NotImplementedError, match="detach the tangent before it enters the loss"):
        change.sum().backward()
    with forward_ad.dual_level():
        out, _ = _attend(*(forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)))
        with pytest.raises(NotImplementedError, match="detach the tangent before it enters the loss"):
            forward_ad.unpack_dual(out).tangent.sum().backward()


def test_gradients_by_torch_func_are_exact() -> None:
    inputs, _ = _inputs()
    expected = torch.autograd.grad(softmax_attention(*inputs)[0].square().sum(), inputs)
    found = torch.func.grad(_loss, argnums=(0, 1, 2))(*inputs)
    assert max(max_error(mine, theirs) for mine, theirs in zip(found, expected, strict=True)) < 1e-12


def test_jacobians_and_maps_over_samples_are_exact() -> None:
    (q, k, v), (dq, *_) = _inputs()

    def both(attend: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        pairs = torch.stack([q, dq])
        mapped = torch.func.vmap(lambda x: attend(x, k, v)[0])(pairs)
        changes = torch.func.vmap(lambda x, y: torch.func.jvp(lambda z: attend(z, k, v)[0], (x,), (y,))[1])(
            pairs, pairs.sin()
        )
        gradients = torch.func.vmap(torch.func.grad(lambda x: attend(x, k, v)[0].square().sum()))(pairs)
        jacobians = [f(lambda x: attend(x, k, v)[0][0, :2, 0])(q) for f in (torch.func.jacfwd, torch.func.jacrev)]
        return [mapped, changes, gradients, *jacobians]

    found, expected = both(_attend), both(softmax_attention)
    assert max(max_error(mine, theirs) for mine, theirs in zip(found, expected, strict=True)) < 1e-12


def _linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A loss of which the gradient with respect to the output depends on no input."""
    return _attend(q, k, v)[0].sum()


@pytest.mark.parametrize("loss", [_loss, _linear])
def test_a_gradient_of_a_gradient_is_refused(loss: Callable[..., Tensor]) -> None:
    for index in range(3):
        inputs, _ = _inputs()
        (first,) = torch.autograd.grad(loss(*inputs), inputs[index], create_graph=True)
        with pytest.raises(NotImplementedError, match="a second derivative of context-parallel attention"):
            (first.square().sum() + inputs[index].sum()).backward()
    inputs, tangents = _inputs(frozen=True)
    for call in (
        lambda: torch.func.grad(lambda q: torch.func.grad(loss)(q, *inputs[1:]).sum())(inputs[0]),
        lambda: torch.func.jvp(torch.func.grad(loss), tuple(inputs), tuple(tangents)),
    ):
        with pytest.raises(NotImplementedError, match="a second derivative of context-parallel attention"):
            call()


def test_a_forward_derivative_of_a_gradient_is_refused() -> None:
    inputs, tangents = _inputs()
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)]
        loss = _loss(*duals)
        with pytest.raises(NotImplementedError, match="a second derivative of context-parallel attention"):
            torch.autograd.grad(loss, inputs)
    out, _ = _attend(*inputs)  # a graph from before the level, and a gradient that has a tangent
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="a second derivative of context-parallel attention"),
    ):
        torch.autograd.grad(out, inputs, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


def test_a_forward_derivative_of_a_forward_derivative_is_refused() -> None:
    (q, k, v), (dq, *_) = _inputs()

    def first(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda y: _attend(y, k, v)[0], (x,), (dq,))[1]

    with pytest.raises(NotImplementedError, match="detach the tangent before it enters the loss"):
        torch.func.jvp(first, (q,), (dq,))


def test_a_gradient_without_a_derivative_within_a_dual_level_is_exact() -> None:
    inputs, _ = _inputs()
    expected = torch.autograd.grad(softmax_attention(*inputs)[0].square().sum(), inputs)
    with forward_ad.dual_level():
        found = torch.autograd.grad(_loss(*inputs), inputs)
    assert max(max_error(mine, theirs) for mine, theirs in zip(found, expected, strict=True)) < 1e-12


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at inputs
@pytest.mark.parametrize("first", ["plain", "jvp"])
@pytest.mark.default(1)
def test_a_compiled_attention_leaves_tangents_to_eager_code(first: str) -> None:
    inputs, tangents = _inputs(frozen=True)
    _, (expected, _) = torch.func.jvp(softmax_attention, tuple(inputs), tuple(tangents))
    torch.compiler.reset()
    compiled = torch.compile(_attend, backend="aot_eager")
    if first == "plain":
        compiled(*inputs)
    _, (found, _) = torch.func.jvp(compiled, tuple(inputs), tuple(tangents))
    assert max_error(found, expected) < 1e-12


def test_tangents_in_a_graph_that_may_not_break_are_refused() -> None:
    """Torch 2.14 refuses inputs with a tangent itself."""
    inputs, tangents = _inputs(frozen=True)
    torch.compiler.reset()
    compiled = torch.compile(_attend, backend="aot_eager", fullgraph=True)
    compiled(*inputs)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)]
        refusal = r"torch.compile with forward derivatives .* is not implemented|forward-mode AD tangent"
        with pytest.raises(Exception, match=refusal):
            compiled(*duals)

    def derivative(*x: Tensor) -> object:
        return torch.func.jvp(_attend, x[:3], x[3:])

    with pytest.raises(Exception, match=r"torch.compile with forward derivatives .* is not implemented"):
        torch.compile(derivative, backend="aot_eager", fullgraph=True)(*inputs, *tangents)
