"""The scripts of docs/sampling.md run unchanged, and their pictures are those of one process."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.e2e.recipe import ROOT
from tests.harness import RankPool

PAGE = (ROOT / "docs/sampling.md").read_text(encoding="utf-8")
SCRIPTS = {text.splitlines()[0].lstrip("# "): text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)}
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d")
PROMPTS = ["a dog", "a cat", "a bird"]


@pytest.fixture(scope="module")
def folder(run_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pipeline `tiny-flux`, and the pictures of one process: of each prompt, and of seed 42."""
    path: Path = tmp_path_factory.mktemp("sampling")
    run_ranks(1, _save, path, init=False)
    return path


@pytest.fixture
def here(folder: Path) -> Iterator[Path]:
    """The same, without the pictures of other tests."""
    yield folder
    for picture in folder.glob("*.png"):
        picture.unlink()


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.chdir(folder):
        warnings.simplefilter("ignore")
        yield


def _save(rank: int, world: int, folder: Path) -> None:
    """The autoencoder of the pipeline makes pictures 8 times smaller, as the true one does."""
    from tests.pipelines.flux import TINY
    from tests.pipelines.vaes import kl

    with _inside(folder):
        pipe = TINY["flux"].make()
        pipe = type(pipe)(**{**pipe.components, "vae": kl(4, levels=4)})
        pipe.save_pretrained("tiny-flux")
        Path("alone").mkdir()
        for name, prompt, seed in [*((i, text, i) for i, text in enumerate(PROMPTS)), ("tokens", PROMPTS[0], 42)]:
            generator = torch.Generator().manual_seed(seed)
            pipe(prompt, height=64, width=96, num_inference_steps=2, generator=generator).images[0].save(
                f"alone/{name}.png"
            )


def _run(rank: int, world: int, folder: Path, name: str) -> None:
    """Run a script of the page in one of its processes."""
    with _inside(folder):
        exec(compile(SCRIPTS[name], name, "exec"), {"__name__": "__main__"})


def _check(folder: Path, pictures: dict[str, str]) -> None:
    """Exactly these pictures were written, and each equals that of one process, up to a rounding of its pixels."""
    assert {x.name for x in folder.glob("*.png")} == set(pictures)
    for found, expected in pictures.items():
        a, b = (np.asarray(Image.open(folder / name)).astype(int) for name in (found, f"alone/{expected}.png"))
        assert a.shape == (64, 96, 3)
        assert a.std() > 1
        assert abs(a - b).max() <= 1


@pytest.mark.parametrize(
    ("world", "name", "pictures"),
    [
        (2, "our_prompts.py", {f"ours_{i}.png": f"{i}" for i in range(3)}),
        pytest.param(3, "our_prompts.py", {f"ours_{i}.png": f"{i}" for i in range(3)}, marks=pytest.mark.full),
        (2, "our_stages.py", {"our_stages.png": "tokens"}),
    ],
)
@pytest.mark.default(1)
def test_scripts_give_the_pictures_of_one_process(
    run_ranks: RankPool, here: Path, world: int, name: str, pictures: dict[str, str]
) -> None:
    run_ranks(world, _run, here, name, init=False)
    _check(here, pictures)


def _without_a_group(rank: int, world: int, folder: Path) -> str:
    from diffusers import DiffusionPipeline

    from lightning_cp import ContextParallelConfig, parallelize_pipeline

    with _inside(folder):
        pipe = DiffusionPipeline.from_pretrained("tiny-flux")
        with pytest.raises(ValueError, match="there is no process group") as caught:
            parallelize_pipeline(pipe, ContextParallelConfig())
        return str(caught.value)


def test_without_a_process_group_ranks_are_refused(run_ranks: RankPool, folder: Path) -> None:
    assert all(run_ranks(2, _without_a_group, folder, init=False))


@pytest.mark.full
def test_scripts_run_under_torchrun(here: Path) -> None:
    (here / "our_prompts.py").write_text(SCRIPTS["our_prompts.py"], encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *TORCHRUN, "our_prompts.py"]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    _check(here, {f"ours_{i}.png": f"{i}" for i in range(3)})
