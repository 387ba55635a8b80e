"""Pipelines give one process's latents, whatever tokens and branches are shared out, and are as before afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp import parallelize_pipeline, unparallelize_pipeline
from lightning_cp.pipelines import parallel_pipeline
from tests.dist.compare import of_first_rank
from tests.harness import RankPool
from tests.harness.cases import grouped
from tests.models.modes import MODES
from tests.pipelines import PIPES
from tests.pipelines.report import Measured, write_list
from tests.pipelines.tiny import error_of

# (mode of the context, ranks, cfg)
TRIALS = {
    "ring3": ("ring", 3, 1),
    "rotation3": ("rotation", 3, 1),
    "ulysses3": ("ulysses", 3, 1),
    "unified4": ("unified", 4, 1),
    "cfg2": ("ring", 1, 2),
    "cfg2_ring2": ("ring", 2, 2),
    "cfg2_ulysses2": ("ulysses", 2, 2),
}
_DEFAULT = [("flux_kontext", 2), ("sd3", 4), ("wan_two_experts", 4), ("hunyuan_video", 3)]


# the other pipelines of each model: 4 ranks for those with guidance, 3 for the others
_OTHERS = [(name, 3 if tiny.guidance == "none" else 4) for name, tiny in PIPES.items()]
CASES = {f"{case[0]}-{case[1]}": [case] for case in _DEFAULT}
CASES |= grouped((x for x in _OTHERS if x not in _DEFAULT), lambda x: f"other {x[0].partition('_')[0]}")
CASES["guided-3"] = [("sd3", 3), ("wan", 3), ("qwen_image", 3), ("z_image", 3)]
_measured: list[Measured] = []


@pytest.fixture(scope="module", autouse=True)
def _list() -> Iterator[None]:
    yield
    if "LIGHTNING_CP_PIPELINES_TABLE" in os.environ:
        write_list(Path(os.environ["LIGHTNING_CP_PIPELINES_TABLE"]), _measured)


def _attributes(pipe: Any) -> list[list[str]]:
    """Names of the attributes of each model."""
    return [sorted(module.__dict__) for module in pipe.components.values() if isinstance(module, torch.nn.Module)]


def _errors(rank: int, world: int, name: str, trials: list[str]) -> list[tuple[float, int, str]]:
    """The largest relative error of each trial, and the calls that were shared out by branch; the pipeline's class."""
    tiny = PIPES[name]
    pipe = tiny.pipe()
    # the first call sets attributes of some models, so their names are those of the first rank, too
    alone, before = of_first_rank(lambda: (tiny.draw(pipe), _attributes(pipe)))
    found = []
    for trial in trials:
        mode, ranks, cfg = TRIALS[trial]
        parallelize_pipeline(pipe, MODES[mode](ranks), cfg=cfg)
        installed = parallel_pipeline(pipe)
        assert installed is not None
        assert tuple(installed.transformers) == tiny.transformers
        assert tuple(installed.controlnets) == tiny.controlnets
        together = tiny.draw(pipe, seed=7 + rank)
        unparallelize_pipeline(pipe)
        found.append((error_of(alone, together), installed.branch_runner.shared, type(pipe).__name__))
    assert _attributes(pipe) == before
    assert rank < world - 1 or torch.equal(tiny.draw(pipe), alone)  # one rank: cores are few
    return found


def _one_picture(rank: int, world: int, mode: str, cfg: int) -> float:
    """Error of one picture with two prompts and two generators: SD3 encodes an empty batch for the second of them."""
    tiny = PIPES["sd3_img2img"]
    pipe = tiny.pipe()
    inputs = {**tiny.inputs(), "prompt": ["a cat", "two green birds"], "negative_prompt": ["blurry", "dark"]}
    counts: list[int] = []
    pipe.vae.encoder.register_forward_pre_hook(lambda _, args: counts.append(len(args[0])))

    def draw() -> Tensor:
        latents: Tensor = pipe(**inputs, generator=[torch.Generator().manual_seed(seed) for seed in (7, 8)]).images
        return latents

    alone = of_first_rank(draw)
    parallelize_pipeline(pipe, MODES[mode](world // cfg), cfg=cfg)
    together = draw()
    assert counts[-2:] == [1, 0], "diffusers encodes an empty batch"
    return error_of(alone, together)


@pytest.mark.parametrize(("mode", "world", "cfg"), [("ring", 3, 1), ("unified", 4, 2)])
@pytest.mark.default(1)
def test_one_picture_for_two_generators(run_ranks: RankPool, mode: str, world: int, cfg: int) -> None:
    assert max(run_ranks(world, _one_picture, mode, cfg)) <= 1e-4


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
@pytest.mark.default(len(_DEFAULT))
def test_latents_are_those_of_one_process(run_ranks: RankPool, cases: list[tuple[str, int]]) -> None:
    for i, (name, world) in enumerate(cases):
        guidance = PIPES[name].guidance
        trials = [trial for trial, (_, ranks, cfg) in TRIALS.items() if ranks * cfg == world]
        trials = [trial for trial in trials if TRIALS[trial][2] == 1 or guidance != "none"]
        if world == 4 and cases[0] not in _DEFAULT:
            del trials[1 + i % 2]  # ring and Ulysses take turns beside branches
        for found in run_ranks(world, _errors, name, trials):
            for trial, (error, shared, kind) in zip(trials, found, strict=True):
                _measured.append(Measured(kind, guidance, error))
                assert error <= 1e-4, f"{name}, {trial}: {error:.1e}"
                assert (shared > 0) == (TRIALS[trial][2] > 1), f"{name}, {trial}: {shared} calls were shared out"
