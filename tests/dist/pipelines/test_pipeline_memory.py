"""Sharded weights, and stages one after another: the latents of one process, with less memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_cp import parallelize_pipeline, unparallelize_pipeline
from lightning_cp.comm.packet import BUFFERS
from lightning_cp.engine.peers.samples import reading_of
from lightning_cp.errors import PlanError
from lightning_cp.pipelines import features as pipeline_features
from lightning_cp.pipelines.placement import sharding
from tests import features
from tests.harness import RankPool
from tests.models.modes import MODES
from tests.pipelines import PIPES
from tests.pipelines.tiny import error_of

ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


def _pipe(name: str) -> Any:
    return PIPES[name].pipe()


def _output(pipe: Any, name: str, **others: Any) -> Tensor:
    return PIPES[name].draw(pipe, **others)


def _storages(tensors: Any) -> dict[int, Any]:
    """Storages of tensors (of this rank's shards), each once."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return {x.untyped_storage()._cdata: x.untyped_storage() for x in local if not x.is_meta}


def _bytes_of(tensors: Any) -> int:
    return sum(storage.nbytes() for storage in _storages(tensors).values())


def _live() -> list[Tensor]:
    """All plain tensors that this process holds, but for buffers and constants that wait for the next call."""
    BUFFERS.forget()
    reading_of.cache_clear()
    gc.collect()
    found = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    return [x for x in found if type(x) in (Tensor, nn.Parameter, DTensor)]


class _Weights:
    """For each component of a pipeline, how many bytes of its present weights are still held later, by anyone."""

    def __init__(self, pipe: Any) -> None:
        self.weak = {
            name: [StorageWeakRef(storage) for storage in _storages(module.parameters()).values()]
            for name, module in _modules(pipe).items()
        }

    def held_bytes(self) -> dict[str, int]:
        live = {address: storage.nbytes() for address, storage in _storages(_live()).items()}
        return {name: sum(live.get(x.cdata, 0) for x in weak if not x.expired()) for name, weak in self.weak.items()}


# --- weights over ranks


def _sharded(
    rank: int, world: int, name: str, shard: tuple[str, ...], trial: tuple[str, int, int]
) -> tuple[float, dict[str, float]]:
    """The error, and of each component the part of its layers' bytes that this rank holds after a call."""
    mode, ranks, cfg = trial
    pipe = _pipe(name)
    alone = _output(pipe, name)
    layers = {key: _layer_bytes(pipe.components[key]) for key in shard}
    whole = _pipe(name)
    parallelize_pipeline(whole, MODES[mode](ranks), cfg=cfg)
    expected = _output(whole, name)
    del whole
    before = _bytes_of(_live())
    parallelize_pipeline(pipe, MODES[mode](ranks), cfg=cfg, shard=shard)
    together = _output(pipe, name)
    assert torch.equal(together, expected), "not the bits of whole weights"
    held = {key: _layer_bytes(pipe.components[key]) / layers[key] for key in shard}
    saved = before - _bytes_of(_live())
    assert saved >= 0.9 * sum(layers[key] * (1 - held[key]) for key in shard), "the whole weights live on"
    with pytest.raises(PlanError, match="cannot be gathered in place"):
        unparallelize_pipeline(pipe)
    assert torch.equal(_output(pipe, name), together), "a refusal changes nothing"
    return error_of(alone, together), held


def _layer_bytes(module: nn.Module) -> int:
    """Bytes of everything in lists of modules."""
    lists = [inner for inner in module.modules() if isinstance(inner, nn.ModuleList)]
    return _bytes_of({x for each in lists for x in each.parameters()})


SHARDED = {
    "flux": ("flux_true_cfg", ("transformer", "text_encoder", "text_encoder_2")),  # CLIP, T5
    "sd3": ("sd3", ("transformer", *ENCODERS)),  # two of CLIP, T5; both branches in one call
    "wan": ("wan_two_experts", ("transformer", "transformer_2", "text_encoder")),
}
WAYS = {3: [("ulysses", 3, 1)], 4: [("unified", 4, 1), ("ring", 2, 2), ("ulysses", 2, 2)]}


@pytest.mark.parametrize(("kind", "world"), [("flux", 3), ("sd3", 4), ("wan", 4)])
@pytest.mark.default(1)
def test_sharded_pipelines_give_one_process_latents(run_ranks: RankPool, kind: str, world: int) -> None:
    for trial in WAYS[world]:
        _, context, cfg = trial
        for error, held in run_ranks(world, _sharded, *SHARDED[kind], trial, timeout_s=240):
            assert error <= 1e-4, f"{trial}: {error:.1e}"
            features.compared("sharded weights (`shard=`)", error)
            for name, part in held.items():
                over = context if name.startswith("transformer") else context * cfg
                assert part <= 1 / over + 0.1, f"{trial}: {name}: {part:.2f} of its layers' bytes"


def _mixed_types(rank: int, world: int) -> tuple[float, list[str]]:
    """Norms in another type than the rest, as diffusers loads Wan in lower precision."""
    pipe = _pipe("wan")
    for block in pipe.transformer.blocks:
        block.norm2.to(torch.float64)
        block.norm2.register_forward_pre_hook(lambda module, args: (args[0].double(),))
        block.norm2.register_forward_hook(lambda module, args, output: output.float())
    alone = _output(pipe, "wan")
    parallelize_pipeline(pipe, MODES["ring"](world), shard=["transformer"])
    whole = [name for name, x in pipe.transformer.blocks.named_parameters() if not isinstance(x, DTensor)]
    return error_of(alone, _output(pipe, "wan")), whole


@pytest.mark.full
def test_weights_of_another_type_stay_whole(run_ranks: RankPool) -> None:
    for error, whole in run_ranks(2, _mixed_types):
        assert error <= 1e-4
        assert whole
        assert all(".norm2." in name for name in whole)


def _refused(rank: int, world: int) -> list[str]:
    """The errors for components that cannot be sharded. The pipeline works afterwards."""
    pipe = _pipe("flux_true_cfg")
    said = []
    for shard, cfg, ring in ((["vae"], 1, 2), ("tokenizer", 1, 2), (["transformer"], 2, 1)):
        with pytest.raises(PlanError) as refusal:
            parallelize_pipeline(pipe, MODES["ring"](ring), cfg=cfg, shard=shard)
        said.append(str(refusal.value))
    with pytest.raises(ValueError, match="stages='later' must be one of 'together', 'offload', 'release'"):
        parallelize_pipeline(pipe, MODES["ring"](world), stages="later")  # type: ignore[arg-type]
    parallelize_pipeline(pipe, MODES["ring"](world))
    unparallelize_pipeline(pipe)
    return said


def _fails_half_way(rank: int, world: int) -> list[str]:
    pipe = _pipe("flux_true_cfg")
    real, spread = sharding.fully_shard, []

    def fails_at_third(layer: nn.Module, **settings: Any) -> None:
        if len(spread) == 2:
            raise RuntimeError("out of memory")
        spread.append(layer)
        real(layer, **settings)

    sharding.fully_shard = fails_at_third  # type: ignore[assignment]
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            parallelize_pipeline(pipe, MODES["ring"](world), shard=["transformer"])
    finally:
        sharding.fully_shard = real
    said = []
    for attempt in (lambda: _output(pipe, "flux_true_cfg"), lambda: parallelize_pipeline(pipe, MODES["ring"](world))):
        with pytest.raises(PlanError) as refusal:
            attempt()
        said.append(str(refusal.value))
    return said


def test_what_cannot_be_sharded_is_refused_by_name(run_ranks: RankPool) -> None:
    for said in run_ranks(2, _refused):
        parts = ("a AutoencoderKL cannot be sharded", "must be one of the components", "cfg=2")
        assert all(part in message for part, message in zip(parts, said, strict=True))


def test_a_partly_sharded_pipeline_raises_at_every_call(run_ranks: RankPool) -> None:
    for called, again in run_ranks(2, _fails_half_way):
        assert "is only partly sharded" in called
        assert "out of memory" in called
        assert "transformer is already sharded (FSDP): load it unsharded" in again


# --- stages, one after another

_DEVICE = torch.device("cpu", 0)  # in place of an accelerator: weights that are not on it are not numbers


def _on_a_device(pipe: Any) -> None:
    """Has components, when they are moved to the host, lose their values until they are moved to `_DEVICE`."""
    pipeline_features.sampling_device = lambda ranks: _DEVICE  # type: ignore[assignment]
    for module in _modules(pipe).values():
        module.to = _Parked(module)  # type: ignore[assignment]


class _Parked:
    """`module.to`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.values = [(x, x.data) for x in module.parameters()]

    def __call__(self, device: torch.device | str) -> nn.Module:
        for x, values in self.values:
            x.data = values if torch.device(device) == _DEVICE else torch.full_like(values, torch.nan)
        return self.module


def _modules(pipe: Any) -> dict[str, nn.Module]:
    return {name: x for name, x in pipe.components.items() if isinstance(x, nn.Module)}


def _present(pipe: Any) -> tuple[str, ...]:
    """Components with weights."""
    found = []
    for name, module in _modules(pipe).items():
        local = [x.to_local() if isinstance(x, DTensor) else x for x in module.parameters()]
        if not any(x.is_meta or x.isnan().any() for x in local):
            found.append(name)
    return tuple(found)


def _watch(pipe: Any, note: Any) -> None:
    """`note(stage)` at each encoding of a text, each step, and each decoding, on every rank."""
    step = pipe.scheduler.step

    def noted(*args: Any, **kwargs: Any) -> Any:
        note("denoise")
        return step(*args, **kwargs)

    pipe.scheduler.step = noted
    pipe.text_encoder.register_forward_hook(lambda *_: note("encode") and None)
    pipe.vae.decoder.register_forward_pre_hook(lambda *_: note("decode") and None)


def _offloaded(
    rank: int, world: int, name: str, trial: tuple[str, int, int]
) -> tuple[list[float], dict[str, set[tuple[str, ...]]]]:
    """Errors of two calls, and which components had weights in which stage."""
    mode, ranks, cfg = trial
    pipe = _pipe(name)
    alone = _output(pipe, name, output_type="pt")
    found: dict[str, set[tuple[str, ...]]] = {}
    real = pipeline_features.sampling_device
    _on_a_device(pipe)
    try:
        parallelize_pipeline(pipe, MODES[mode](ranks), cfg=cfg, stages="offload", vae=True)
    finally:
        pipeline_features.sampling_device = real
    _watch(pipe, lambda stage: found.setdefault(stage, set()).add(_present(pipe)))
    assert not _present(pipe)
    assert pipe.device == pipe._execution_device == _DEVICE
    errors = [error_of(alone, _output(pipe, name, output_type="pt")) for _ in range(2)]
    assert not _present(pipe)
    unparallelize_pipeline(pipe)
    assert pipe.device != _DEVICE
    return errors, found


OFFLOADED = {
    "flux": ("flux_true_cfg", ("text_encoder", "text_encoder_2"), ("transformer",)),
    "controlnet": ("flux_controlnet", ("text_encoder", "text_encoder_2"), ("controlnet", "transformer")),
    "wan": ("wan_two_experts", ("text_encoder",), ("transformer", "transformer_2")),
}
STAGED = {"ring2": ("ring", 2, 1), "ring3": ("ring", 3, 1), "cfg2_ring2": ("ring", 2, 2)}


@pytest.mark.parametrize(("kind", "way"), [("wan", "ring2"), ("controlnet", "cfg2_ring2"), ("flux", "ring3")])
@pytest.mark.default(1)
def test_offloaded_components_are_there_in_their_stage_only(run_ranks: RankPool, kind: str, way: str) -> None:
    name, encode, denoise = OFFLOADED[kind]
    _, ranks, cfg = STAGED[way]
    for errors, found in run_ranks(ranks * cfg, _offloaded, name, STAGED[way], timeout_s=240):
        assert max(errors) <= 1e-4
        features.compared('`stages="offload"`', max(errors))
        assert {frozenset(x) for x in found["encode"]} == {frozenset(encode)}
        assert all(set(x) <= set(denoise) for x in found["denoise"])
        assert set().union(*found["denoise"]) == set(denoise)
        if kind == "wan":
            assert found["denoise"] == {(name,) for name in denoise}, "both experts are on the device"
            features.compared('one expert of Wan at a time on the device (`stages="offload"`)', max(errors))
        assert found["decode"] == {("vae",)}


def _released(
    rank: int, world: int, name: str, trial: tuple[str, int, int], shard: tuple[str, ...]
) -> tuple[float, dict[str, dict[str, int]], str]:
    """The error, the bytes of each component's weights at each stage, and the error of a second call."""
    mode, ranks, cfg = trial
    pipe = _pipe(name)
    alone = _output(pipe, name, output_type="pt")
    found: dict[str, dict[str, int]] = {}
    parallelize_pipeline(pipe, MODES[mode](ranks), cfg=cfg, stages="release", vae=True, shard=shard)
    weights = _Weights(pipe)
    _watch(pipe, lambda stage: found.setdefault(stage, weights.held_bytes()))
    images = _output(pipe, name, output_type="pt")
    assert pipe._execution_device == torch.device("cpu")
    seen = dict(found)
    found.clear()
    with pytest.raises(PlanError) as refusal:
        _output(pipe, name, output_type="pt")
    assert not found, "something ran"
    return error_of(alone, images), seen, str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "way", "shard"),
    [
        ("flux", "ring2", ("transformer", "text_encoder")),
        ("wan", "cfg2_ring2", ("transformer", "text_encoder")),
        ("controlnet", "ring3", ()),
    ],
)
@pytest.mark.default(1)
def test_what_is_no_longer_needed_is_freed(run_ranks: RankPool, kind: str, way: str, shard: tuple[str, ...]) -> None:
    name, encode, denoise = OFFLOADED[kind]
    _, ranks, cfg = STAGED[way]
    for error, found, said in run_ranks(ranks * cfg, _released, name, STAGED[way], shard, timeout_s=240):
        assert error <= 1e-4
        assert _with_bytes(found["encode"]) == {*encode, *denoise, "vae"}
        assert _with_bytes(found["denoise"]) == {*denoise, "vae"}
        assert _with_bytes(found["decode"]) == {"vae"}
        assert ".text_encoder is needed for prompt" in said or ".transformer is needed" in said
        assert "stages='release' allows a single call" in said


def _with_bytes(held_bytes: dict[str, int]) -> set[str]:
    return {name for name, count in held_bytes.items() if count}
