"""Fine-tuning with the recipe: equal losses at every topology, exact resumes, and files that plain diffusers loads."""

from __future__ import annotations

import functools
import math
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from safetensors.torch import load_file

from lightning_cp.checkpoint import latest_checkpoint
from lightning_cp.checkpoint.store import load_checkpoint
from lightning_cp.latent_cache import LatentCache
from tests.e2e.finetuning import run_recipe, write_cache, write_media
from tests.e2e.recipe import Finished, run, started
from tests.families.cases import CASES
from tests.harness.cases import in_turn

LORA_FILE = "lora/pytorch_lora_weights.safetensors"
QUICK = ("progress=false", "warmup_steps=1", "optim.lr=0.01", "accelerator=cpu")
SMALL_LORA = (
    "lora.rank=4",
    "lora.alpha=32",
    "batch_size=2",
    "data.validation=2",
    "validation.every=3",
    "validation.quantiles=[0.3,0.7]",
    "ema_decay=0.5",
)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d")
FOUR_RANKS = ("strategy=cp", "ring=2", "data_parallel=2")


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a Wan pipeline, six clips and their cache."""
    return write_cache(tmp_path_factory.mktemp("wan"), "wan")


@pytest.fixture(scope="module")
def alone(wan: Path) -> Finished:
    """A LoRA of one process: five steps; an epoch has two."""
    return tune(wan, "alone", *SMALL_LORA, "max_steps=5", "checkpoint_every=3")


def tune(
    made: Path,
    name: str,
    *overrides: str,
    experiment: str = "finetune_wan",
    launcher: tuple[str, ...] = (),
    timeout_s: float = 400,
) -> Finished:
    """Fine-tune the pipeline of `made` on its cache, without a failure. In `name`, "=" and " " become "_"."""
    given = (f"experiment={experiment}", f"model.pretrained={made / 'pipe'}", f"data.path={made / 'latents'}", *QUICK)
    folder = made / re.sub("[= ]", "_", name)
    finished = run(*given, *overrides, folder=folder, launcher=launcher, timeout_s=timeout_s)
    assert finished.exit_code == 0, finished.stdout + finished.stderr
    return finished


def val_losses(finished: Finished) -> list[float]:
    """Return the validation losses in order."""
    return [row.val_loss for row in finished.rows if not math.isnan(row.val_loss)]


def sample(made: Path, name: str, *overrides: str) -> torch.Tensor:
    """Sample one picture or clip with recipes/sample.py. Returns: its pixels."""
    frames, height, width = CASES["wan"].size
    size = (f"+call.height={height}", f"+call.width={width}", f"+call.num_frames={frames}", "num_inference_steps=2")
    where = (f"hydra.run.dir={made / name}", f"output_root={made}")
    run_recipe("sample", made, *where, "prompts=[wave number 1]", *size, *overrides)
    (file,) = (path for path in (made / name / "samples").iterdir() if path.suffix in (".png", ".gif"))
    with Image.open(file) as image:
        return torch.tensor(np.stack([np.asarray(x.convert("RGB")) for x in ImageSequence.Iterator(image)])).float()


def test_lora_on_four_ranks_equals_one_process(wan: Path, alone: Finished) -> None:
    four = tune(wan, "four", *SMALL_LORA, "max_steps=3", "checkpoint_every=2", *FOUR_RANKS)
    assert len(alone.losses) == 5
    assert len(set(alone.losses)) == 5
    assert four.losses == pytest.approx(alone.losses[:3], rel=1e-4)
    assert val_losses(four) == pytest.approx(val_losses(alone)[:1], rel=1e-4)
    assert "4 cpu rank(s) = data 2 × ring 2 × ulysses 1" in four.stdout
    # in the middle of the second epoch, and at another topology
    resumed = tune(wan, "resumed", *SMALL_LORA, "max_steps=5", f"resume={four.folder / 'checkpoints/step_00000003'}")
    assert [row.step for row in resumed.rows] == [1, 2, 3, 4, 5]
    assert resumed.losses == pytest.approx(alone.losses, rel=1e-4)
    assert val_losses(resumed) == pytest.approx(val_losses(alone), rel=1e-4)
    mine, expected = (load_file(run.folder / LORA_FILE) for run in (resumed, alone))
    assert mine.keys() == expected.keys()
    for key, x in mine.items():
        torch.testing.assert_close(x, expected[key], rtol=1e-3, atol=1e-4)
    assert (four.folder / "lora" / "comfyui.safetensors").is_file()


def test_diffusers_loads_the_lora(wan: Path, alone: Finished) -> None:
    from diffusers import WanPipeline

    pipe: Any = WanPipeline.from_pretrained(wan / "pipe")
    pipe.load_lora_weights(str(alone.folder / "lora"))
    assert pipe.get_active_adapters()
    assert any(x.abs().sum() > 0 for name, x in pipe.transformer.named_parameters() if "lora_B" in name)


@pytest.mark.full
def test_the_recipe_samples_with_the_lora(wan: Path, alone: Finished) -> None:
    source = f"source={wan / 'pipe'}"
    before, after = sample(wan, "before", source), sample(wan, "after", source, f"lora={alone.folder}")
    assert before.shape == after.shape
    assert not torch.equal(before, after)
    with pytest.raises(AssertionError, match=re.escape(f"use source=<its pipeline> lora={alone.folder} or")):
        sample(wan, "refused", f"source={alone.folder}")


OPTIONS = {  # with the largest relative difference of losses between three ranks and one process
    "model.dtype=bfloat16": 1e-2,
    "activation_checkpointing=selective": 1e-4,
    "activation_checkpointing=offload": 1e-4,
    "model.compile=true": 1e-4,
    "model.quantize=nf4": 1e-4,
    "model.offload=true activation_checkpointing=full": 1e-4,
    "model.quantize=fp8 model.dtype=bfloat16 precision=bf16-mixed": 2e-2,
}


@pytest.fixture(scope="module")
def one_process(wan: Path) -> Callable[[str], Finished]:
    """Train with an option on one process, once."""
    return functools.cache(lambda option: tune(wan, f"one_{option}", *SMALL_LORA, "max_steps=3", *option.split()))


@pytest.mark.full
@pytest.mark.parametrize(("option", "strategy"), in_turn(OPTIONS, ("cp", "cp_fsdp")))
def test_options_on_three_ranks_equal_one_process(
    wan: Path, alone: Finished, one_process: Callable[[str], Finished], option: str, strategy: str
) -> None:
    if "model.offload" in option and strategy == "cp_fsdp":  # refused: test_finetune_settings.py
        strategy = "cp trainer=lightning"
    single, tolerance = one_process(option), OPTIONS[option]
    assert single.losses == pytest.approx(alone.losses[:3], rel=1e-1 if "nf4" in option else 3e-2)
    changes_weights = "model.dtype" in option or "model.quantize" in option
    assert (single.losses == pytest.approx(alone.losses[:3], rel=1e-6)) != changes_weights
    given = (option, f"strategy={strategy}", "ring=3")
    finished = tune(wan, f"three_{option}_{strategy}", *SMALL_LORA, "max_steps=3", *" ".join(given).split())
    assert finished.losses == pytest.approx(single.losses, rel=tolerance)
    assert val_losses(finished) == pytest.approx(val_losses(single), rel=tolerance)
    mine, expected = (load_file(run.folder / LORA_FILE) for run in (finished, single))
    assert mine.keys() == expected.keys()
    assert all(x.dtype == torch.float32 for x in mine.values())
    saved = load_checkpoint(finished.folder / "checkpoints/step_00000003").states["model"]
    assert all(".lora_" in name for name, x in saved.items() if x.numel() > 1), "frozen weights are not saved"


@pytest.mark.full
def test_torchrun_gives_the_losses_of_one_process(wan: Path, alone: Finished) -> None:
    given = (*SMALL_LORA, "max_steps=3", "strategy=cp", "ring=2", "trainer=lightning")
    finished = tune(wan, "torchrun", *given, launcher=TORCHRUN)
    assert finished.losses == pytest.approx(alone.losses[:3], rel=1e-4)


@pytest.mark.full
def test_several_folders_are_encoded_at_the_start(wan: Path) -> None:
    held_out, media = wan / "held_out", wan / "media"
    held_out.mkdir()
    for suffix in ("mp4", "txt"):
        (held_out / f"x.{suffix}").write_bytes((media / f"0.{suffix}").read_bytes())
    prior = f"{{path: {media}, name: prior, use: prior, weight: 0.5, caption: a wave}}"
    data = f"data.path=[{{path: {media}, caption: 'ohwx {{}}'}},{prior},{{path: {held_out}, use: validation}}]"
    given = ("data=folder", data, "data.sizes=[[32,48]]", "data.frames=5", "lora.rank=4", "validation.every=1")
    finished = tune(wan, "folders", *given, "batch_size=2", "max_steps=2", "strategy=cp", "ring=2")
    assert len(val_losses(finished)) == 2
    cache = LatentCache(finished.folder / "latents")
    found = [(row.id, row.use, row.weight, cache.caption(row.captions[0])) for row in cache.rows]
    assert found[0] == ("0.mp4", "train", 1.0, "ohwx wave number 0")
    assert found[6:8] == [
        ("held_out/x.mp4", "validation", 1.0, "wave number 0"),
        ("prior/0.mp4", "prior", 0.5, "a wave"),
    ]
    assert len(found) == 13


@pytest.mark.full
def test_masks_give_the_same_losses_at_every_topology(tmp_path: Path) -> None:
    def masked(folder: Path, case: str, count: int) -> Path:
        write_media(folder, case, count)
        _, height, width = CASES[case].size
        for i in range(1, count):  # the first one has none
            mask = np.zeros((height, width), np.uint8)
            mask[:, : 8 * (1 + i)] = 255
            Image.fromarray(mask).save(folder / f"{i}.mask.png")
        return folder

    made, plain = write_cache(tmp_path / "masked", "wan", 4, write=masked), write_cache(tmp_path / "plain", "wan", 4)
    given = ("lora.rank=4", "batch_size=2", "max_steps=2")
    alone = tune(made, "alone", *given)
    assert alone.losses != pytest.approx(tune(plain, "alone", *given).losses, rel=1e-3)
    for ranks in (2, 3):
        several = tune(made, f"ring_{ranks}", *given, "strategy=cp", f"ring={ranks}")
        assert several.losses == pytest.approx(alone.losses, rel=1e-5)
        mine, expected = (load_file(run.folder / LORA_FILE) for run in (several, alone))
        for key, x in mine.items():
            torch.testing.assert_close(x, expected[key], rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_overfitting_four_samples_halves_the_loss(tmp_path: Path) -> None:
    made = write_cache(tmp_path / "made", "cogvideox", count=5)
    given = ("data.validation=1", "validation.every=60", "batch_size=4", "max_steps=60", "lora=null", "ema_decay=0")
    finished = tune(made, "overfit", *given, experiment="finetune_cogvideox")
    first, last = (sum(finished.losses[part]) for part in (slice(0, 8), slice(-8, None)))
    assert last < 0.5 * first
    assert len(val_losses(finished)) == 1


@pytest.mark.full
def test_the_second_expert_trains_on_its_range(tmp_path: Path) -> None:
    made = write_cache(tmp_path / "experts", "wan_two_experts", count=3)
    given = ("lora.rank=4", "batch_size=2", "data.validation=1", "validation.every=2")
    second = ("model.component=transformer_2", "max_steps=2")
    finished = tune(made, "second", *given, *second)
    assert "transformer_2 is trained on 0 < sigma <= 0.875" in finished.stdout
    wide = tune(made, "wide", *given, *second, "objective.sigma_range=[0.5,1.0]")
    assert "warning: transformer_2 is trained on 0.5 < sigma <= 1 (objective.sigma_range), but the pip" in wide.stdout
    names = load_file(finished.folder / LORA_FILE)
    assert names
    assert all(name.startswith("transformer_2.") for name in names)
    other = ("max_steps=3", "strategy=cp", "ring=3", f"resume={finished.folder}")  # the first expert has other weights
    with pytest.raises(AssertionError, match="step_00000002 was trained on other frozen weights than those of model"):
        tune(made, "first", *given, *other)


@pytest.mark.full
def test_a_stopped_job_saves_the_adapter_of_its_checkpoint(wan: Path) -> None:
    data = (f"model.pretrained={wan / 'pipe'}", f"data.path={wan / 'latents'}")
    given = ("experiment=finetune_wan", *data, *QUICK, "lora.rank=4", "batch_size=2", "checkpoint_every=2")
    folder = wan / "stopped"
    endless = (*given, "max_steps=100000", "save_every=100000", "strategy=cp_fsdp", "ring=2")
    with started(*endless, folder=folder) as process:
        deadline = time.monotonic() + 300
        while latest_checkpoint(folder) is None:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    newest = latest_checkpoint(folder)
    assert newest is not None
    (saved,) = (folder / "saved").iterdir()
    assert saved.name == newest.name
    step = int(newest.name.removeprefix("step_"))
    exported = tune(wan, "exported", "lora.rank=4", "batch_size=2", f"resume={newest}", f"max_steps={step}")
    found, expected = load_file(saved / LORA_FILE), load_file(exported.folder / LORA_FILE)
    assert found.keys() == expected.keys()
    assert all(torch.equal(x, expected[key]) for key, x in found.items())
