"""Both experts of Wan 2.2 in one run of the recipe: equal at every topology, resumed, exported and sampled."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from safetensors.torch import load_file

from lightning_cp.checkpoint.store import load_checkpoint
from tests.e2e.finetune.test_finetune import LORA_FILE, QUICK, SMALL_LORA, sample, tune, val_losses
from tests.e2e.finetuning import write_cache
from tests.e2e.recipe import Finished, error_of, run

NAMES = ("transformer", "transformer_2")
# Half of the steps train each expert; the quantiles are of both. Each is drawn before step 3 and after it.
HALF = ("objective.density={_target_: lightning_cp.objectives.Uniform}", "objective.shift=7.0", "seed=1")
CHOSEN = (*SMALL_LORA, *HALF, "max_steps=6", "checkpoint_every=3", "validation.quantiles=[0.3,0.7]")
PICTURES = ("sampling.every=6", "sampling.prompts=[wave number 1]", "sampling.num_inference_steps=2")


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a pipeline of two experts, six clips and their cache."""
    return write_cache(tmp_path_factory.mktemp("wan22"), "wan_two_experts")


@pytest.fixture(scope="module")
def both(wan: Path) -> Callable[..., Finished]:
    """Train both experts."""
    return functools.partial(tune, wan, experiment="finetune_wan22")


@pytest.fixture(scope="module")
def alone(both: Callable[..., Finished]) -> Finished:
    """The run of one process."""
    return both("alone", *CHOSEN, *PICTURES)


def assert_equal_runs(finished: Finished, expected: Finished, *, steps: slice = slice(None)) -> None:
    """Compare the experts and losses of the steps; a resumed run has the rows of the steps before it, too."""
    rows, others = finished.rows[steps], expected.rows[steps]
    assert [(row.step, row.expert) for row in rows] == [(row.step, row.expert) for row in others]
    assert [row.loss for row in rows] == pytest.approx([row.loss for row in others], rel=1e-4)


def assert_equal_adapters(finished: Finished, expected: Finished) -> None:
    mine, theirs = (load_file(one.folder / LORA_FILE) for one in (finished, expected))
    assert {name.partition(".")[0] for name in theirs} == {*NAMES}
    assert mine.keys() == theirs.keys()
    for name, x in mine.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_a_resume_at_another_topology_trains_as_one_process(both: Callable[..., Finished], alone: Finished) -> None:
    drawn = [row.expert for row in alone.rows]
    assert {*drawn[:3]} == {*drawn[3:]} == {1.0, 2.0}
    assert "transformer is trained on 0.875 < sigma <= 1 in 50.0% of the steps" in alone.stdout
    for row in alone.rows:
        assert (row.sigma > 0.875) == (row.expert == 1.0)
    three = both("three", *CHOSEN, "max_steps=3", "strategy=cp", "ring=3")
    assert_equal_runs(three, alone, steps=slice(0, 3))
    last = three.folder / "checkpoints/step_00000003"
    resumed = both("resumed", *CHOSEN, "strategy=cp_fsdp", "ulysses=2", f"resume={last}")
    assert_equal_runs(resumed, alone, steps=slice(3, None))
    assert val_losses(resumed) == pytest.approx(val_losses(alone), rel=1e-4)
    assert_equal_adapters(resumed, alone)


@pytest.mark.full
def test_diffusers_loads_both_adapters_and_draws_the_pictures_of_the_run(wan: Path, alone: Finished) -> None:
    from diffusers import WanPipeline

    card = (alone.folder / "lora/README.md").read_text()
    pipe: Any = WanPipeline.from_pretrained(wan / "pipe")
    lines = [line for line in card.splitlines() if line.startswith("pipe.")]
    assert len(lines) == 2
    for line in lines:
        exec(line, {"pipe": pipe, "folder": str(alone.folder / "lora")})
    for name in NAMES:
        adapted = [x for key, x in getattr(pipe, name).named_parameters() if "lora_B" in key]
        assert adapted, name
        assert all(x.abs().sum() > 0 for x in adapted), name
    files = {path.name for path in (alone.folder / "lora").glob("comfyui*")}
    assert files == {f"comfyui_{name}.safetensors" for name in NAMES}
    given = (f"source={wan / 'pipe'}", "seed=1")
    base, mine = sample(wan, "base", *given), sample(wan, "mine", *given, f"lora={alone.folder}")
    with Image.open(alone.folder / "samples/final/0000.gif") as image:
        drawn = torch.tensor(np.stack([np.asarray(x.convert("RGB")) for x in ImageSequence.Iterator(image)])).float()
    assert torch.equal(mine, drawn)
    assert not torch.equal(mine, base)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        ("strategy=cp_fsdp", "ring=2", "data_parallel=2", "micro_batch_size=1"),
        ("strategy=cp", "ulysses=2", "trainer=lightning", "model.compile=true"),
    ],
    ids=" ".join,
)
def test_options_give_the_same_run(both: Callable[..., Finished], alone: Finished, options: tuple[str, ...]) -> None:
    finished = both("with_" + "_".join(options), *CHOSEN, *PICTURES, *options)
    assert_equal_runs(finished, alone)
    assert val_losses(finished) == pytest.approx(val_losses(alone), rel=1e-4)
    assert_equal_adapters(finished, alone)


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), [("strategy=cp ring=2", "strategy=cp_fsdp ring=3")])
def test_a_resume_before_an_expert_was_drawn(
    both: Callable[..., Finished], alone: Finished, first: str, second: str
) -> None:
    assert alone.rows[0].expert != alone.rows[2].expert
    started = both(f"started {first} {second}", *CHOSEN, "max_steps=1", *first.split())
    last = started.folder / "checkpoints/step_00000001"
    resumed = both(f"resumed {first} {second}", *CHOSEN, *second.split(), f"resume={last}")
    assert_equal_runs(resumed, alone, steps=slice(1, None))
    assert_equal_adapters(resumed, alone)


@pytest.mark.full
def test_an_adapter_of_both_is_continued(both: Callable[..., Finished], alone: Finished) -> None:
    options = ("lora.rank=null", "lora.alpha=null", f"lora.file={alone.folder / 'lora'}")
    continued = both("continued", *CHOSEN, *options, "max_steps=1", "optim.lr=1e-12", "ema_decay=0")
    mine, theirs = (load_file(one.folder / LORA_FILE) for one in (continued, alone))
    assert mine.keys() == theirs.keys()
    for name, x in mine.items():
        torch.testing.assert_close(x, theirs[name], rtol=0, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("options", [("strategy=cp_fsdp", "ring=2")], ids=["cp_fsdp"])
def test_all_weights_of_both_are_saved_for_from_pretrained(
    wan: Path, both: Callable[..., Finished], options: tuple[str, ...]
) -> None:
    from diffusers import WanTransformer3DModel

    finished = both(f"all_{len(options)}", *CHOSEN, "lora=null", "max_steps=3", "ema_decay=0", *options)
    saved = load_checkpoint(finished.folder / "checkpoints/step_00000003").states["model"]
    assert (finished.folder / "transformer/README.md").is_file()
    for name in NAMES:
        base, loaded = (
            WanTransformer3DModel.from_pretrained(folder / name).state_dict()
            for folder in (wan / "pipe", finished.folder)
        )
        assert any(not torch.equal(loaded[key], base[key]) for key in base)
        assert all(torch.equal(x, saved[f"{name}.{key}"]) for key, x in loaded.items())


@pytest.mark.full
def test_an_expert_that_is_hardly_ever_drawn_is_one_error(wan: Path) -> None:
    given = ("experiment=finetune_wan22", f"model.pretrained={wan / 'pipe'}", f"data.path={wan / 'latents'}", *QUICK)
    finished = run(*given, *CHOSEN, "objective.shift=0.005", "strategy=cp", "ring=2", folder=wan / "rare")
    assert re.search(r"transformer would be trained in 0.0007\d* of the steps: the probability", error_of(finished))


@pytest.mark.full
def test_a_resume_with_one_of_the_experts_is_refused(both: Callable[..., Finished], alone: Finished) -> None:
    with pytest.raises(AssertionError, match="belongs to another model or optimizer"):
        both("one", *CHOSEN, "model.component=transformer", f"resume={alone.folder}", "objective.shift=7.0")


@pytest.mark.full
def test_a_resume_may_name_the_experts_in_another_order(both: Callable[..., Finished], alone: Finished) -> None:
    started = both("in order", *CHOSEN, "max_steps=3")
    last, swapped = started.folder / "checkpoints/step_00000003", "model.component=[transformer_2,transformer]"
    resumed = both("swapped", *CHOSEN, swapped, f"resume={last}")
    assert resumed.losses[3:] == pytest.approx(alone.losses[3:], rel=1e-4)
    assert [row.expert for row in resumed.rows[3:]] == [3 - row.expert for row in alone.rows[3:]]
    assert_equal_adapters(resumed, alone)
