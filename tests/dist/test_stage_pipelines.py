"""One pipeline of each class in stages of blocks, without the weights of other stages, against the whole one."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_cp import ContextParallelConfig, parallelize_pipeline
from tests.dist.pipefusion import error_of, latents_of, make_pipe
from tests.harness import RankPool

_NAMES = (
    *("ace_step", "allegro", "anyflow", "auraflow", "bria", "chronoedit", "cogvideox", "cogview3_plus", "easyanimate"),
    *("ernie_image", "fibo", "flux", "flux2", "flux_fill", "flux_inpaint", "flux_kontext", "framepack", "helios"),
    *("hunyuan_image", "hunyuan_video", "joyimage", "joyimage_edit", "kandinsky6", "latte", "longcat_audio"),
    *("longcat_image", "ltx", "ovis_image", "pixart_alpha", "qwen_image", "qwen_image_edit", "sd3", "skyreels"),
    *("stable_audio", "wan", "wan_image_to_video", "wan_animate", "z_image"),
)
_WITHOUT_GUIDANCE = ("flux", "flux2", "flux_fill", "hunyuan_video")
_STEPS = 5


def _compare(rank: int, world: int, name: str, patches: int, cfg: int = 1) -> list[float]:
    """Errors of three calls. tests/pipelines compares the reference, which has the engine but no stages, with none."""
    alone, staged = make_pipe(name), make_pipe(name)
    parallelize_pipeline(alone, ContextParallelConfig(mesh=None), patches=patches, vae=False)
    parallelize_pipeline(staged, ContextParallelConfig(), patches=patches, pipe=world // cfg, cfg=cfg, vae=False)
    inputs: dict[str, Any] = {"num_inference_steps": _STEPS}
    expected = latents_of(alone, name, **inputs)
    return [error_of(expected, latents_of(staged, name, **inputs)) for _ in range(3)]


@pytest.mark.full
@pytest.mark.parametrize("patches", [1, 2])
@pytest.mark.parametrize("name", _NAMES)
def test_stages_change_nothing(run_ranks: RankPool, name: str, patches: int) -> None:
    for errors in run_ranks(2, _compare, name, patches, timeout_s=200):
        assert max(errors) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("patches", [1, 2])
@pytest.mark.parametrize("name", [name for name in _NAMES if name not in _WITHOUT_GUIDANCE])
def test_stages_of_two_branches_change_nothing(run_ranks: RankPool, name: str, patches: int) -> None:
    for errors in run_ranks(4, _compare, name, patches, 2, timeout_s=200):
        assert max(errors) < 1e-12
