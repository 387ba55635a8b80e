"""Pictures of five sizes in one batch, and a context degree per batch, in the recipe."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from lightning_cp.precompute import PrecomputeSettings, precompute
from tests.e2e.finetune.test_finetune import SMALL_LORA, tune, val_losses
from tests.e2e.finetuning import frames_of, write_pipeline
from tests.e2e.recipe import Finished
from tests.families.cases import CASES
from tests.unit.finetune.media.encode import write_video

SIZES = [[16, 16], [16, 24], [24, 24], [24, 40], [48, 32]]  # 16, 24, 36, 60 and 96 tokens
MIXED = (*SMALL_LORA, "data.mixed=true", "batch_size=5", "max_steps=4", "checkpoint_every=2", "seed=3")
DEGREES = "degrees.by_tokens={36: 1, 60: 2}"


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a Flux pipeline, twelve pictures of five sizes and their cache."""
    folder = tmp_path_factory.mktemp("mixture")
    pipe, media = write_pipeline(folder / "pipe", "flux"), folder / "media"
    media.mkdir()
    for i in range(12):
        height, width = SIZES[i % 5]
        Image.fromarray(frames_of(i, (1, height, width))[0]).save(media / f"{i}.png")
        (media / f"{i}.txt").write_text("wave " * (1 + i % 3))
    settings = PrecomputeSettings(sizes=SIZES, dtype=torch.float32, sheet=0)
    precompute(pipe, media, folder / "latents", settings=settings, device=torch.device("cpu"), progress=False)
    return folder


@pytest.fixture(scope="module")
def trained(flux: Path) -> Callable[..., Finished]:
    return functools.partial(tune, flux, experiment="finetune_flux")


@pytest.fixture(scope="module")
def alone(trained: Callable[..., Finished]) -> Finished:
    """The run of one process."""
    return trained("alone", *MIXED)


def assert_equal_runs(finished: Finished, expected: Finished, *, steps: slice = slice(None)) -> None:
    """Compare losses and noise levels of the steps."""
    rows, others = finished.rows[steps], expected.rows[steps]
    assert [row.step for row in rows] == [row.step for row in others]
    assert [row.loss for row in rows] == pytest.approx([row.loss for row in others], rel=1e-5)
    assert [row.sigma for row in rows] == pytest.approx([row.sigma for row in others], rel=1e-6)


@pytest.mark.full
def test_a_mixture_resumes_at_other_degrees_with_the_losses_of_one_process(
    trained: Callable[..., Finished], alone: Finished
) -> None:
    first = trained("first", *MIXED, "max_steps=2", "strategy=cp", "ring=2", "data_parallel=2")
    assert re.search(r"\d+ samples of 5 sizes in batches of 5 for 2 data groups: the longest group has", first.stderr)
    assert_equal_runs(first, alone, steps=slice(2))
    last = first.folder / "checkpoints/step_00000002"
    degrees = ("strategy=cp", "ring=2", "ulysses=2", DEGREES)
    resumed = trained("resumed", *MIXED, *degrees, f"resume={last}")
    steps = [int(number) for number in re.findall(r"context degree \d: (\d+) steps", resumed.stderr)]
    assert len(steps) == 3
    assert steps[-1] < sum(steps)
    assert_equal_runs(resumed, alone, steps=slice(2, None))
    assert val_losses(resumed)[-1] == pytest.approx(val_losses(alone)[-1], rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        ("strategy=cp_fsdp", "data_parallel=3", "micro_batch_size=1"),
        ("strategy=cp_fsdp", "ring=2", "ulysses=2", DEGREES, "trainer=lightning"),
        ("strategy=cp", "ring=2", "data_parallel=2", "num_workers=1", "trainer=lightning"),
    ],
    ids=" ".join,
)
def test_options_give_the_same_run(trained: Callable[..., Finished], alone: Finished, options: tuple[str, ...]) -> None:
    finished = trained("with_" + re.sub(r"\W+", "_", "_".join(options)), *MIXED, *options)
    assert_equal_runs(finished, alone)
    assert val_losses(finished) == pytest.approx(val_losses(alone), rel=1e-4)


@pytest.mark.full
def test_groups_run_the_same_number_of_forwards_of_a_model_with_buffers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """DDP sends the buffers of Wan in forwards: with different numbers of forwards, ranks would wait for ever."""
    wan = tmp_path_factory.mktemp("wan")
    pipe, media = write_pipeline(wan / "pipe", "wan"), wan / "media"
    media.mkdir()
    frames, height, width = CASES["wan"].size
    sizes = [[height, width], [width, height]]
    for i in range(6):
        write_video(media / f"{i}.mp4", frames_of(i, (frames, *sizes[i % 2])))
        (media / f"{i}.txt").write_text(f"wave number {i}")
    settings = PrecomputeSettings(sizes=sizes, frames=frames, dtype=torch.float32, sheet=0)
    precompute(pipe, media, wan / "latents", settings=settings, device=torch.device("cpu"), progress=False)
    mixed = (
        *SMALL_LORA,
        "data.mixed=true",
        "batch_size=3",
        "max_steps=3",
        "data.validation=0",
        "validation.every=null",
    )
    alone = tune(wan, "alone", *mixed)
    assert "2 sizes" in alone.stderr
    assert_equal_runs(tune(wan, "two", *mixed, "strategy=cp", "ring=2", "data_parallel=2", timeout_s=150), alone)


@pytest.mark.full
def test_degrees_of_batches_of_one_size_give_the_run_of_one_process(trained: Callable[..., Finished]) -> None:
    one_size = (*SMALL_LORA, "batch_size=4", "max_steps=4", "data.validation=0", "validation.every=null")
    alone = trained("one_size", *one_size)
    degrees = trained("one_size_degrees", *one_size, "strategy=cp", "ring=4", DEGREES)
    assert len({row.loss for row in alone.rows}) == 4
    assert_equal_runs(degrees, alone)
    saved = sorted((alone.folder / "checkpoints").iterdir())[-1]
    longer = trained("one_size_longer", *one_size, "max_steps=6")
    later = trained("one_size_later", *one_size, "max_steps=6", "strategy=cp", "ring=4", DEGREES, f"resume={saved}")
    assert_equal_runs(later, longer, steps=slice(4, None))
