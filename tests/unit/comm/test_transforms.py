"""Derivatives of the linear operators, of any order, in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_cp.comm.halo import fetch_halo, halo_exchange, sum_over_ranks
from lightning_cp.comm.shards import gather_shards
from lightning_cp.mesh.groups import SINGLE_RANK

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "gather": lambda x: gather_shards(x, 1, [5], SINGLE_RANK.name),
    "sum": lambda x: sum_over_ranks(x, SINGLE_RANK.name),
    "margin": lambda x: halo_exchange(x, 1, [5], 2, SINGLE_RANK.name),
}
each = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())


def _pair() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 2, 30).double().view(2, 5, 3), torch.linspace(3, -1, 30).double().view(2, 5, 3)


@each
@pytest.mark.parametrize("frozen", [True, False])
def test_tangents_pass_through_at_every_call(operator: Callable[[Tensor], Tensor], frozen: bool) -> None:
    x, tangent = _pair()
    x.requires_grad_(not frozen)
    for _ in range(4):
        assert torch.equal(torch.func.jvp(operator, (x,), (tangent,))[1], tangent)
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(operator(forward_ad.make_dual(x, tangent)))
            assert torch.equal(out.primal, x)
            assert torch.equal(out.tangent, tangent)


@each
def test_derivatives_of_derivatives_are_exact(operator: Callable[[Tensor], Tensor]) -> None:
    x, tangent = _pair()

    def loss(y: Tensor) -> Tensor:
        return operator(y).pow(3).sum()

    hessian_by_tangent = 6 * x * tangent
    forward_over_reverse = torch.func.jvp(torch.func.grad(loss), (x,), (tangent,))[1]
    reverse_over_forward = torch.func.grad(lambda y: torch.func.jvp(loss, (y,), (tangent,))[1])(x)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (reverse_over_reverse,) = torch.autograd.grad((gradient * tangent).sum(), leaf)
    for found in (forward_over_reverse, reverse_over_forward, reverse_over_reverse):
        torch.testing.assert_close(found, hessian_by_tangent, rtol=0, atol=1e-12)


@each
def test_jacobians_and_maps_over_samples_are_exact(operator: Callable[[Tensor], Tensor]) -> None:
    x, tangent = _pair()
    pairs = torch.stack([x, tangent])
    assert torch.equal(torch.func.vmap(operator)(pairs), pairs)
    identity = torch.eye(30, dtype=torch.float64).view(2, 5, 3, 2, 5, 3)
    assert torch.equal(torch.func.jacfwd(operator)(x), identity)
    assert torch.equal(torch.func.jacrev(operator)(x), identity)


def test_an_exchange_without_a_derivative_refuses_tangents() -> None:
    x, tangent = _pair()
    fetch_halo(x, 1, 1, 1, groups=SINGLE_RANK)
    with pytest.raises(NotImplementedError, match="the halo exchange of a parallel VAE has no forward derivative"):
        torch.func.jvp(lambda y: fetch_halo(y, 1, 1, 1, groups=SINGLE_RANK)[0] or y, (x,), (tangent,))
