"""With stages of blocks, a rank reads the weights of its own stage only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cp import ContextParallelConfig, parallelize_pipeline
from lightning_cp.errors import CallFailedError, PlanError
from lightning_cp.finetune import meta_transformer, weight_files
from lightning_cp.finetune.pipeline import load_pipeline
from lightning_cp.pipelines import parallel_pipeline
from tests.dist.pipefusion import latents_of, make_pipe
from tests.harness import RankPool
from tests.pipelines.tiny import error_of


def _saved(folder: Path, name: str) -> Path:
    make_pipe(name).save_pretrained(folder, max_shard_size="60KB")
    return folder


def _staged(folder: Path, settings: dict[str, Any]) -> tuple[Any, list[str]]:
    """A pipeline whose transformer is built without weights, and the names of the weights that were read."""
    read, copy = list[str](), weight_files._copy
    pipe = load_pipeline(
        str(folder), torch.float64, components={"transformer": meta_transformer(folder, dtype=torch.float64)}
    )
    pipe.set_progress_bar_config(disable=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files, "_copy", lambda file, name, target: (read.append(name), copy(file, name, target)))
        parallelize_pipeline(pipe, ContextParallelConfig(), **settings)
    return pipe, read


def _module(pipe: Any, path: str) -> Any:
    return pipe.transformer.get_submodule(path)


def _compare(rank: int, world: int, folder: Path, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Latents of both ways to load; names of the blocks that were read and of those of this stage."""
    whole = load_pipeline(str(folder), torch.float64)
    whole.set_progress_bar_config(disable=True)
    parallelize_pipeline(whole, ContextParallelConfig(), **settings)
    expected = latents_of(whole, name)
    pipe, read = _staged(folder, settings)
    pipe.to("cpu")
    state = parallel_pipeline(pipe)
    assert state is not None
    stage = state.patch_runners["transformer"].stage if state.patch_runners else None
    paths = {path for path, module in pipe.transformer.named_modules() if stage is not None and module in stage.blocks}
    blocks = [] if stage is None else [stage.blocks[i] for i in stage.range]
    own = {path for path in paths if _module(pipe, path) in blocks}
    return {
        "error": error_of(expected, latents_of(pipe, name)),
        "read": {path for path in paths for weight in read if weight.startswith(f"{path}.")},
        "own": own,
        "others": [x for x in read if not any(x.startswith(f"{path}.") for path in paths)],
        "training": pipe.transformer.training,
    }


@pytest.mark.parametrize(
    ("world", "name", "settings"), [(3, "flux", {"pipe": 3, "patches": 2}), (2, "sd3", {"pipe": [1, 2], "patches": 3})]
)
@pytest.mark.default("sd3")
def test_a_rank_reads_the_weights_of_its_stage(
    run_ranks: RankPool, tmp_path: Path, world: int, name: str, settings: dict[str, Any]
) -> None:
    found = run_ranks(world, _compare, _saved(tmp_path, name), name, settings)
    for rank in found:
        assert rank["error"] < 1e-12
        assert rank["read"] == rank["own"]
        assert rank["others"]  # the modules before and after the blocks
        assert not rank["training"]
    assert sum(len(rank["own"]) for rank in found) == len(set.union(*(rank["own"] for rank in found)))


def _alone(rank: int, world: int, folder: Path) -> float:
    """Without stages, the transformer is read whole."""
    expected = latents_of(load_pipeline(str(folder), torch.float64), "flux")
    pipe, _ = _staged(folder, {})
    return error_of(expected, latents_of(pipe, "flux"))


def test_without_stages_the_whole_transformer_is_read(run_ranks: RankPool, tmp_path: Path) -> None:
    assert run_ranks(1, _alone, _saved(tmp_path, "flux")) < [1e-12]


def _unreadable(rank: int, world: int, folder: Path) -> list[str]:
    """One rank cannot read its files: what is raised on each rank, and at a call of the pipeline afterwards."""
    pipe = load_pipeline(
        str(folder), torch.float64, components={"transformer": meta_transformer(folder, dtype=torch.float64)}
    )
    said = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(weight_files, "_copy", _fail)
        with pytest.raises((ValueError, CallFailedError)) as error:
            parallelize_pipeline(pipe, ContextParallelConfig(), pipe=world)
    said.append(str(error.value))
    with pytest.raises(PlanError) as again:
        latents_of(pipe, "flux")
    return [*said, str(again.value)]


def _fail(*_: object) -> None:
    raise ValueError("block.safetensors is damaged")


def test_a_rank_that_cannot_read_its_weights_ends_all(run_ranks: RankPool, tmp_path: Path) -> None:
    for first, again in run_ranks(3, _unreadable, _saved(tmp_path, "flux")):
        assert "block.safetensors is damaged" in first
        assert "without some weights of transformer, because parallelize_pipeline failed" in again
