"""VAEs of diffusers over the ranks of a context group: tiles bit for bit, halos within rounding."""

from __future__ import annotations

import hashlib
import math
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXSafeConv3d
from torch import Tensor, nn

from lightning_cp import ContextParallelConfig
from lightning_cp.mesh.groups import SINGLE_RANK, MeshGroups, groups_for
from lightning_cp.vae import parallelize_vae
from lightning_cp.vae.tiles import owners
from tests import features
from tests.dist.vaes import ALL, make_vae
from tests.harness import RankPool
from tests.harness.cases import in_turn


def _run(vae: Any, name: str, way: str) -> Tensor:
    shape = ALL[name].latent if way == "decode" else ALL[name].sample
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(vae.dtype) / 2
    with torch.no_grad():
        out = vae.decode(x).sample if way == "decode" else vae.encode(x, return_dict=False)[0]
    whole: Tensor = out if isinstance(out, Tensor) else out.parameters
    return whole


def _groups(world: int) -> MeshGroups:
    return groups_for(ContextParallelConfig(ring_degree=world))


def _count_convolutions(vae: nn.Module) -> list[int]:
    """The elements that convolutions of encoder and decoder are given from now on."""
    total = [0]

    def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        total[0] += args[0].numel()

    for module in (*vae.encoder.modules(), *vae.decoder.modules()):
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            module.register_forward_pre_hook(add)
    return total


def _compare(rank: int, world: int, name: str, mode: str, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Both ways alone and parallel: equality, largest error, this rank's share of the work, a digest of the bits."""
    results = {}
    for way in ("decode", "encode"):
        if f"{mode} {way}" == ALL[name].broken:
            continue
        vae = make_vae(name, dtype)
        if mode == "tiles":
            vae.enable_tiling(**ALL[name].tiles)
        work = _count_convolutions(vae)
        expected, alone = _run(vae, name, way), work[0]
        parallelize_vae(vae, _groups(world))
        got, shared = _run(vae, name, way), work[0] - alone
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        assert (expected.abs() == 1).float().mean() < 0.5, "a clamped result hides errors"
        results[way] = {
            "equal": torch.equal(got, expected),
            "error": float((got - expected).abs().max() / expected.abs().max()),
            "share": shared / alone,
            "bits": hashlib.sha256(got.contiguous().numpy().tobytes()).hexdigest(),
        }
    return results


def _check(run_ranks: RankPool, world: int, name: str, mode: str, dtype: torch.dtype) -> float:
    """Returns the largest error."""
    everyone = run_ranks(world, _compare, name, mode, dtype)
    for way in everyone[0]:
        results = [result[way] for result in everyone]
        shares, error = [result["share"] for result in results], max(result["error"] for result in results)
        print(f"{name} {mode} {way}, {world} ranks, {dtype}: error {error:.1e}, shares {[round(x, 3) for x in shares]}")
        assert len({result["bits"] for result in results}) == 1, "not the same bits on all ranks"
        if mode == "tiles":
            assert all(result["equal"] for result in results), f"not the VAE's own tiles: {error}"
            assert math.isclose(sum(shares), 1), f"a tile is computed by one rank: {shares}"
        if f"{mode} {way}" == ALL[name].whole:
            assert error == 0.0
            assert shares == [1.0] * world
            continue
        assert error <= {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
        assert max(shares) < 1.5 / world, f"the work is not shared: {shares}"
    return max(result["error"] for results in everyone for result in results.values())


def test_tiles_are_the_vaes_own_bit_for_bit(run_ranks: RankPool) -> None:
    features.compared("VAE decoded and encoded by tiles", _check(run_ranks, 3, "kl", "tiles", torch.float32))


def _shapes_of_an_empty_batch(rank: int, world: int) -> list[tuple[torch.Size, torch.Size]]:
    """The shapes alone and parallel, of tiles and of the whole. (VAEs with attention fail in one process, too.)"""
    vae, shapes = make_vae("kl without attention"), []
    x, z = (torch.zeros(0, *shape[1:]) for shape in (ALL["kl"].sample, ALL["kl"].latent))

    def compute() -> list[torch.Size]:
        with torch.no_grad():
            return [vae.encode(x).latent_dist.parameters.shape, vae.decode(z).sample.shape]

    for tiled in (False, True):
        if tiled:
            vae.enable_tiling(**ALL["kl"].tiles)
        alone = compute()
        undo = parallelize_vae(vae, _groups(world))
        shapes += zip(alone, compute(), strict=True)
        undo()
    return shapes


def test_an_empty_batch_gives_an_empty_result(run_ranks: RankPool) -> None:
    for shapes in run_ranks(3, _shapes_of_an_empty_batch):
        assert all(alone == parallel and not alone[0] for alone, parallel in shapes)


def _formats(rank: int, world: int) -> bool:
    """Return True if the layer after the encoder gets tiles in the memory format of one process (channels_last)."""
    vae = make_vae("kl").to(memory_format=torch.channels_last)
    vae.enable_tiling(**ALL["kl"].tiles)
    seen: list[bool] = []
    vae.quant_conv.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].is_contiguous(memory_format=torch.channels_last))
    )
    _run(vae, "kl", "encode")
    alone = seen.copy()
    seen.clear()
    parallelize_vae(vae, _groups(world))
    _run(vae, "kl", "encode")
    return any(alone) and seen == alone


def test_tiles_keep_the_order_of_their_dims_in_memory(run_ranks: RankPool) -> None:
    assert run_ranks(3, _formats) == [True] * 3


def test_halos_give_the_whole_within_rounding(run_ranks: RankPool) -> None:
    features.compared("VAE decoded and encoded by rows", _check(run_ranks, 3, "kl", "halos", torch.float64))


def _in_chunks(self: nn.Conv3d, video: Tensor) -> Tensor:
    """Convolve chunks of frames, as Mochi's convolutions do above 2 GB."""
    before, chunks = self.kernel_size[0] - 1, list(torch.chunk(video, 2, dim=2))
    if before:
        chunks[1:] = [torch.cat((a[:, :, -before:], b), dim=2) for a, b in pairwise(chunks)]
    return torch.cat([nn.Conv3d.forward(self, chunk) for chunk in chunks], dim=2)


def _compare_chunks(rank: int, world: int) -> float:
    with mock.patch.object(CogVideoXSafeConv3d, "forward", _in_chunks):
        return float(_compare(rank, world, "mochi", "halos", torch.float64)["decode"]["error"])


@pytest.mark.full
def test_halos_of_convolutions_in_chunks_of_frames(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _compare_chunks)) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize(("name", "world"), in_turn(ALL, (3, 4)))
def test_every_class(run_ranks: RankPool, name: str, world: int) -> None:
    for mode in ALL[name].modes.split():
        errors = [_check(run_ranks, world, name, mode, dtype) for dtype in (torch.float32, torch.float64)]
        if mode == "tiles":
            features.compared("VAE decoded and encoded by tiles", errors[0])
        else:
            features.compared("VAE decoded and encoded by rows", errors[1])


def _low_precision(rank: int, world: int, name: str, dtype: torch.dtype) -> list[float]:
    """The error of the halos relative to that of one rank, decoding and encoding."""
    found = []
    for way in ("decode", "encode"):
        vae = make_vae(name).to(dtype)
        exact, alone = _run(deepcopy(vae).double(), name, way), _run(vae, name, way)
        parallelize_vae(vae, _groups(world))
        own, shared = ((x - exact).square().mean().sqrt() for x in (alone, _run(vae, name, way)))
        found.append(float(shared / own))
    return found


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtype"), in_turn(("kl", "wan", "hunyuan"), (torch.bfloat16, torch.float16)))
def test_halos_are_as_exact_as_one_rank_in_half_precision(run_ranks: RankPool, name: str, dtype: torch.dtype) -> None:
    for ratios in run_ranks(3, _low_precision, name, dtype):
        assert max(ratios) <= 1.1


def _behaves(rank: int, world: int) -> None:
    vae, other = make_vae("kl"), make_vae("kl")
    small, latent = torch.randn(1, 4, 2, 2), torch.randn(ALL["kl"].latent)
    expected, tiny = _run(vae, "kl", "decode"), vae.decode(small).sample.detach()
    before = [dict(module.__dict__) for module in (vae, vae.encoder, vae.decoder)]
    undo = parallelize_vae(vae, _groups(world))
    with pytest.raises(ValueError, match="AutoencoderKL is already parallel"):
        parallelize_vae(vae, _groups(world))
    with pytest.raises(ValueError, match=r"AutoencoderKL has no gradients: .* torch.no_grad"):
        vae.decode(latent)
    with pytest.raises(ValueError, match="no gradients"):
        vae.requires_grad_(False).encode(torch.randn(1, 3, 24, 24, requires_grad=True))
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match="a parallel AutoencoderKL has no forward derivative"),
    ):
        torch.func.jvp(lambda z: vae.decode(z).sample, (latent,), (latent,))
    assert torch.equal(vae.decode(small).sample, tiny), "fewer rows than ranks: every rank computes the whole"
    assert torch.equal(_run(other, "kl", "decode"), expected), "another VAE is disturbed"
    shared = _run(vae, "kl", "decode")
    vae.enable_slicing()
    torch.testing.assert_close(_run(vae, "kl", "decode"), shared)
    vae.disable_slicing()
    undo()
    undo()
    after = [module.__dict__ for module in (vae, vae.encoder, vae.decoder)]
    assert [set(x) for x in after] == [set(x) for x in before], "undo left something behind"
    assert torch.equal(_run(vae, "kl", "decode"), expected)


def test_a_parallel_vae_refuses_gradients_and_can_be_undone(run_ranks: RankPool) -> None:
    run_ranks(3, _behaves)


def _fails_on_one(rank: int, world: int) -> str:
    vae = make_vae("kl")
    vae.enable_tiling()
    if rank == 1:
        vae.decoder.conv_in.register_forward_pre_hook(lambda *_: 1 // 0)
    parallelize_vae(vae, _groups(world))
    with pytest.raises(ZeroDivisionError if rank == 1 else RuntimeError) as failure:
        _run(vae, "kl", "decode")
    return str(failure.value)


def test_a_failure_on_one_rank_reaches_all(run_ranks: RankPool) -> None:
    first, _, last = run_ranks(3, _fails_on_one)
    assert first == last
    assert "rank 1 of the context group could not compute its VAE tiles" in first


def test_what_is_not_supported_is_refused_by_name() -> None:
    groups = replace(SINGLE_RANK, context_shape=(2, 1))
    with pytest.raises(ValueError, match="AutoencoderTiny cannot be split over ranks: leave out"):
        parallelize_vae(diffusers.AutoencoderTiny(), groups)
    tiled = make_vae("cogvideox")
    with pytest.raises(ValueError, match=r"AutoencoderKLCogVideoX can be split by tiles only: call vae.enable_tiling"):
        parallelize_vae(tiled, groups)
    tiled.enable_tiling()
    parallelize_vae(tiled, groups)
    tiled.disable_tiling()
    with pytest.raises(ValueError, match="AutoencoderKLCogVideoX can be split by tiles only"):
        _run(tiled, "cogvideox", "decode")
    noisy = diffusers.AutoencoderKLLTXVideo(**{**ALL["ltx"].settings, "decoder_inject_noise": (True, False, False)})
    with pytest.raises(ValueError, match="AutoencoderKLLTXVideo adds random noise"):
        parallelize_vae(noisy, groups)
    vae = make_vae("kl")
    vae.set_attn_processor(AttnProcessor())
    with pytest.raises(ValueError, match=r"AutoencoderKL computes attention with AttnProcessor .*set_default"):
        parallelize_vae(vae, groups)
    vae = make_vae("kl")
    vae.decoder._compiled_call_impl = lambda: None  # what vae.decoder.compile() sets
    with pytest.raises(ValueError, match=r"AutoencoderKL is compiled \(decoder\)"):
        parallelize_vae(vae, groups)
    before = dict(vae.__dict__)
    parallelize_vae(vae, SINGLE_RANK)()
    assert vae.__dict__ == before, "a group of one changes nothing"


def test_units_of_uneven_work_are_dealt_evenly() -> None:
    assert owners({1: 9, 2: 3, 3: 9, 4: 3, 5: 3, 6: 1}, 3) == {1: 0, 3: 1, 2: 2, 4: 2, 5: 2, 6: 0}
    assert owners({1: 5}, 2) == {1: 0}
    assert owners({1: 4, 2: 4, 3: 4, 4: 4}, 2, (3, 1)) == {1: 0, 2: 0, 3: 0, 4: 1}
