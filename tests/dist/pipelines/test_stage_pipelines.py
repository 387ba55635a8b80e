"""Pipelines of most classes in stages of blocks, without the weights of other stages, against the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_cp import ContextParallelConfig, parallelize_pipeline
from tests.dist.pipefusion import latents_of, make_pipe
from tests.harness import RankPool
from tests.harness.cases import in_turn
from tests.pipelines.tiny import error_of

_NAMES = (
    *("ace_step", "allegro", "anyflow", "auraflow", "bria", "chronoedit", "cogvideox", "cogview3_plus", "cogview4"),
    *("easyanimate", "ernie_image", "fibo", "flux2", "longcat_image", "ovis_image"),
    *("flux_kontext", "framepack", "helios_pyramid", "hunyuan_image"),
    *("hunyuan_video", "joyimage_edit", "kandinsky6", "latte", "longcat_audio", "ltx", "ltx2_guided", "pixart_alpha"),
    *("qwen_image_edit", "sana_video", "sd3", "skyreels", "stable_audio", "wan_image_to_video", "wan_animate"),
    *("z_image",),
)
_WITHOUT_GUIDANCE = ("flux2", "hunyuan_video")
# In float64, diffusers' own forward gives NaN for tokens without any key, or multiplies by float32 weights (PRX).
_FLOAT32 = ("lumina2", "omnigen", "prx")
_STEPS = 5


def _compare(
    rank: int, world: int, name: str, patches: int, cfg: int = 1, dtype: torch.dtype = torch.float64
) -> list[float]:
    """Errors of three calls. tests/pipelines compares the reference, which has the engine but no stages, with none."""
    alone, staged = (make_pipe(name, dtype) for _ in range(2))
    parallelize_pipeline(alone, ContextParallelConfig(mesh=None), patches=patches, vae=False)
    parallelize_pipeline(staged, ContextParallelConfig(), patches=patches, pipe=world // cfg, cfg=cfg, vae=False)
    inputs: dict[str, Any] = {"num_inference_steps": _STEPS}
    expected = latents_of(alone, name, **inputs)
    return [error_of(expected, latents_of(staged, name, **inputs)) for _ in range(3)]


_GUIDED = [name for name in _NAMES if name not in _WITHOUT_GUIDANCE]
_CASES = [(name, 2, 1 + (i % 2 and name in _GUIDED), 2) for i, name in enumerate(_NAMES)]  # patches, cfg, stages
_CASES += [("sana", 2, 1, 2), ("ltx2_audio", 1, 1, 2), ("wan", 2, 2, 1)]


@pytest.mark.parametrize(("name", "patches", "cfg", "stages"), list(dict.fromkeys(_CASES)))
@pytest.mark.default("sana-2-1-2")
def test_stages_and_branches_change_nothing(
    run_ranks: RankPool, name: str, patches: int, cfg: int, stages: int
) -> None:
    for errors in run_ranks(cfg * stages, _compare, name, patches, cfg, timeout_s=200):
        assert max(errors) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize(("name", "cfg"), in_turn(_FLOAT32, (1, 2)))
def test_stages_in_float32_change_nothing(run_ranks: RankPool, name: str, cfg: int) -> None:
    """Lumina 2 has long texts here: its first patch has no image tokens, but refines those of both patches."""
    for errors in run_ranks(2 * cfg, _compare, name, 2, cfg, torch.float32, timeout_s=200):
        assert max(errors) < 1e-4
