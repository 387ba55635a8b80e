"""Keys of reference images, kept for later forwards: each rank keeps those of its shard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor, Flux2KVParallelSelfAttnProcessor
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from torch import Tensor

from lightning_cp import apply_context_parallel, parallelize_pipeline, remove_context_parallel, unparallelize_pipeline
from lightning_cp.engine.check import KeepFloat64
from lightning_cp.errors import ShapeError
from tests import features
from tests.harness import RankPool
from tests.harness.cases import in_turn
from tests.models import TINY
from tests.models.modes import MODES
from tests.models.tiny import randn
from tests.pipelines import PIPES

_REFERENCE = 5


def _flux2() -> Any:
    model: Any = TINY["flux2"].build()
    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    return model


def _with_reference(given: dict[str, Any], tokens: int = _REFERENCE) -> dict[str, Any]:
    g = torch.Generator().manual_seed(2)
    joined = {
        name: torch.cat([randn(g, 2, tokens, x.shape[-1]), x], 1)
        for name, x in given.items()
        if name in ("hidden_states", "img_ids")
    }
    return {**given, **joined, "kv_cache_mode": "extract", "num_ref_tokens": tokens, "return_dict": False}


def _flux2_steps(model: Any) -> tuple[list[Tensor], list[int]]:
    """The outputs of three steps, and the reference tokens that each layer keeps."""
    given = TINY["flux2"].arguments()
    out, cache = model(**_with_reference(given))
    outputs, kept = [out], []
    for step in (1, 2):
        g = torch.Generator().manual_seed(10 + step)
        moved = {**given, "hidden_states": randn(g, 2, 15, 4), "timestep": given["timestep"] / (1 + step)}
        outputs += model(**moved, kv_cache=cache, kv_cache_mode="cached", return_dict=False)
    for layer in (*cache.double_block_caches, *cache.single_block_caches):
        kept.append(layer.k_ref.shape[1])
    return [*outputs, *model(**given, return_dict=False)], kept


def _glm_steps(model: Any) -> tuple[list[Tensor], list[int]]:
    """Outputs of two steps with two condition images for the first sample and one for the second; the kept tokens."""
    given = TINY["glm_image_unmasked"].arguments()
    caches = GlmImageKVCache(len(model.transformer_blocks))
    caches.set_mode("write")
    g = torch.Generator().manual_seed(3)
    for widths in ((14, 10), (10, 14)):
        for width in widths:
            tokens = 5 * width // 2
            model(
                hidden_states=randn(g, 1, 4, 10, width),
                encoder_hidden_states=torch.zeros(1, 0, 16, dtype=torch.float64),
                prior_token_id=torch.randint(0, 64, (1, tokens), generator=g),
                prior_token_drop=torch.zeros(1, tokens, dtype=torch.bool),
                timestep=torch.zeros(1, dtype=torch.int64),
                target_size=torch.tensor([[80.0, 8.0 * width]]),
                crop_coords=torch.zeros(1, 2),
                kv_caches=caches,
            )
        caches.next_sample()
    outputs: list[Tensor] = []
    for mode in ("read", "skip", "read"):
        caches.set_mode(mode)
        given["hidden_states"] = randn(g, 2, 4, 10, 14)
        outputs += model(**given, kv_caches=caches, return_dict=False)
    return outputs, [x.shape[1] for layer in caches.caches for x in layer.k_caches]


def _qwen_steps(model: Any, valid: bool = True) -> tuple[list[Tensor], list[int]]:
    """The outputs of three steps, twice, with text and a picture before the one to be made; the kept tokens."""
    given = TINY["qwen_image21"].arguments()
    if valid:
        del given["encoder_hidden_states_mask"]
    g = torch.Generator().manual_seed(4)
    outputs: list[Tensor] = []
    for _ in range(2):
        cache = QwenImage21KVCache(len(model.transformer_blocks))
        given["encoder_hidden_states"] = randn(g, 2, 9, 16)
        for step in range(3):
            moved = torch.cat([given["hidden_states"][:, :8], randn(g, 2, 16, 8)], 1)
            mode = "cached" if step else "extract"
            stepped = {**given, "hidden_states": moved, "timestep": given["timestep"] / (1 + step)}
            output = model(**stepped, kv_cache=cache, kv_cache_mode=mode, return_dict=False)[0]
            outputs.append(output[:, -16:])
    return outputs, [layer.k.shape[1] for layer in cache.layer_caches]


_STEPS: dict[str, tuple[Callable[[], Any], Callable[[Any], tuple[list[Tensor], list[int]]]]] = {
    "flux2": (_flux2, _flux2_steps),
    "glm_image": (TINY["glm_image_unmasked"].build, _glm_steps),
    "qwen_image21": (TINY["qwen_image21"].build, _qwen_steps),
    "qwen_image21_padded": (TINY["qwen_image21"].build, partial(_qwen_steps, valid=False)),
}


def _compared(rank: int, world: int, name: str, mode: str) -> tuple[float, list[int], list[int]]:
    """The largest error; the tokens that each layer keeps, in one process and on this rank."""
    build, steps = _STEPS[name]
    model = build()
    with torch.no_grad(), KeepFloat64():
        expected, whole = steps(model)
        apply_context_parallel(model, MODES[mode](world))
        found, kept = steps(model)
        remove_context_parallel(model)
    error = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True))
    assert all(float((x - y).abs().max()) > 1e-3 for x, y in pairwise(expected)), "the steps differ"
    return error, whole, kept


@pytest.mark.parametrize(
    ("name", "way"),
    [("flux2", ("ring", 3)), *in_turn(_STEPS, (("ulysses", 3), ("rotation", 3), ("unified", 4), ("ring", 3)))],
)
@pytest.mark.default("flux2", "padded")
def test_each_rank_keeps_its_shard_of_the_keys(run_ranks: RankPool, name: str, way: tuple[str, int]) -> None:
    everyone = run_ranks(way[1], _compared, name, way[0])
    for error, whole, kept in everyone:
        assert error < 1e-12
        in_front = name.startswith("qwen_image21")  # two ranks: the first one has all tokens before the last picture
        assert in_front or all(0 < n < m for n, m in zip(kept, whole, strict=True))
        features.compared("kept keys of reference images (FLUX.2 Klein KV, GLM-Image, QwenImage 2.1)", error)
    assert [sum(x) for x in zip(*(kept for _, _, kept in everyone), strict=True)] == everyone[0][1]


def _too_few(rank: int, world: int) -> str:
    model = _flux2()
    apply_context_parallel(model, MODES["ring"](world))
    with torch.no_grad(), pytest.raises(ShapeError) as error:
        model(**_with_reference(TINY["flux2"].arguments(), tokens=2))
    return str(error.value)


def test_fewer_reference_tokens_than_ranks_are_refused(run_ranks: RankPool) -> None:
    for said in run_ranks(3, _too_few):
        assert "holds 2 reference tokens, fewer than the 3 ranks" in said


def _refused(rank: int, world: int) -> list[str]:
    """What is raised by a pipeline that keeps keys, with branches on different ranks, and with patches."""
    said = []
    for name, settings in (
        ("flux2_klein_kv", {"cfg": 2}),
        ("flux2_klein_kv", {"patches": 2}),
        ("qwen_image21_kept", {"cfg": 2}),
    ):
        pipe = PIPES[name].pipe()
        parallelize_pipeline(pipe, MODES["ring"](world // settings.get("cfg", 1)), **settings)
        with pytest.raises(ShapeError) as error:
            PIPES[name].draw(pipe)
        said.append(str(error.value))
        unparallelize_pipeline(pipe)
    return said


def test_kept_keys_are_refused_where_ranks_make_different_calls(run_ranks: RankPool) -> None:
    features.refused("kept keys of reference images, with `cfg=2` or PipeFusion")
    for branches, patches, qwen in run_ranks(2, _refused):
        assert branches.startswith("kv_cache_mode='extract' cannot be used with cfg=2 (it keeps the keys of reference")
        assert patches.startswith("kv_cache_mode='extract' cannot be used with stages of blocks or patches (it keeps")
        assert qwen.startswith("kv_cache_mode='extract' cannot be used with cfg=2 (it keeps keys for the later steps")
        assert "the pipeline's use_kv_cache=False turns this off" in qwen
