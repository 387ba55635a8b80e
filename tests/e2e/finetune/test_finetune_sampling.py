"""Pictures during fine-tuning change nothing, and plain diffusers draws the last ones from the exported files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.e2e.finetuning import run_recipe, write_cache
from tests.e2e.recipe import Finished, error_of, run
from tests.families.cases import CASES

_, HEIGHT, WIDTH = CASES["flux"].size
PROMPTS = ("wave number 1", "a red fox")
SETTINGS = ("experiment=finetune_flux", "progress=false", "warmup_steps=1", "optim.lr=0.01", "accelerator=cpu")
SMALL = ("batch_size=2", "max_steps=3", "ema_decay=0.5")
DROPOUT = ("lora.rank=4", "lora.dropout=0.3")  # draws from torch's global random state
PICTURES = ("sampling.every=1", f"sampling.prompts=[{','.join(PROMPTS)}]", "sampling.num_inference_steps=2")


SECOND: dict[str, Any] = {"prompt": PROMPTS[1], "seed": 1}
OTHER = {**SECOND, "seed": 7, "height": 2 * HEIGHT, "negative_prompt": "a blue bird", "true_cfg_scale": 2.0}


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a Flux pipeline, six pictures and their cache."""
    return write_cache(tmp_path_factory.mktemp("flux"), "flux")


def _tune(made: Path, name: str, *overrides: str) -> Finished:
    given = (*SETTINGS, f"model.pretrained={made / 'pipe'}", f"data.path={made / 'latents'}")
    return run(*given, *SMALL, *overrides, folder=made / name, timeout_s=400)


@pytest.mark.full  # tests/dist/finetune/test_prompt_sampler.py compares them, too
@pytest.mark.parametrize(
    "options",
    [
        ("precision=bf16-mixed", "strategy=cp_fsdp", "ring=3"),
        ("trainer=lightning", "strategy=cp_fsdp", "ring=2", "data_parallel=2"),
        ("model.offload=true", "activation_checkpointing=full", "strategy=cp", "ring=2"),
    ],
    ids=" ".join,
)
def test_losses_are_the_same_with_and_without_pictures(flux: Path, options: tuple[str, ...]) -> None:
    name = "_".join(options).replace("=", "_")
    drawn = _tune(flux, f"with_{name}", *DROPOUT, *options, *PICTURES, "sampling.at_start=true")
    plain = _tune(flux, f"without_{name}", *DROPOUT, *options)
    assert drawn.exit_code == plain.exit_code == 0, drawn.stderr + plain.stderr
    assert len(set(drawn.losses)) == 3
    assert drawn.losses == plain.losses
    assert [row.grad_norm for row in drawn.rows] == [row.grad_norm for row in plain.rows]
    names = {path.name for path in (drawn.folder / "samples").iterdir()}
    steps = ("step_00000000", "step_00000001", "step_00000002", "final")
    assert names == {x for name in steps for x in (name, f"{name}.png")}
    first, last = (np.asarray(Image.open(drawn.folder / f"samples/{x}.png")) for x in ("step_00000001", "final"))
    assert (first != last).any()


@pytest.mark.full
@pytest.mark.parametrize("options", [("lora.rank=4", "lora.alpha=32"), ("lora=null",)], ids=" ".join)
def test_plain_diffusers_draws_equal_pictures(flux: Path, options: tuple[str, ...]) -> None:
    from diffusers import FluxPipeline, FluxTransformer2DModel

    (flux / "prompts.yaml").write_text(json.dumps([PROMPTS[0], OTHER]))
    drawing = ("sampling.at_start=true", f"sampling.prompts={flux / 'prompts.yaml'}", "sampling.every=3")
    finished = _tune(flux, "_".join(options).replace("=", "_"), *options, *PICTURES, *drawing)
    assert finished.exit_code == 0, finished.stderr
    pipe: Any = FluxPipeline.from_pretrained(flux / "pipe")
    assert _differences(pipe, finished.folder, "samples/step_00000000", OTHER) == [0, 0]
    if options == ("lora=null",):
        pipe.transformer = FluxTransformer2DModel.from_pretrained(finished.folder / "transformer")
        assert _differences(pipe, finished.folder, other=OTHER) == [0, 0]
        return
    assert min(_differences(pipe, finished.folder, other=OTHER)) > 0  # the base
    pipe.load_lora_weights(finished.folder / "lora")
    assert _differences(pipe, finished.folder, other=OTHER) == [0, 0]
    pipe.unload_lora_weights()
    pipe.load_lora_weights(finished.folder / "lora", weight_name="comfyui.safetensors")  # it has tensors for alpha
    assert _differences(pipe, finished.folder, other=OTHER) == [0, 0]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [(), ("strategy=cp", "ring=2", "pipe=2")], ids=["alone", "pipe"])
def test_the_recipe_samples_with_trained_weights_and_adapters_on_them(flux: Path, ranks: tuple[str, ...]) -> None:
    from diffusers import FluxPipeline, FluxTransformer2DModel

    number, levels = len(ranks), 1 if ranks else 0  # on several ranks another rounding may change a value by a level
    whole = _tune(flux, f"whole{number}", "lora=null", *PICTURES, "sampling.every=3")
    adapter = _tune(flux, f"adapter{number}", "lora.rank=4", "lora.alpha=32", "lora.dropout=0.5")
    pipe: Any = FluxPipeline.from_pretrained(flux / "pipe")
    pipe.transformer = FluxTransformer2DModel.from_pretrained(whole.folder / "transformer")
    assert _differences(pipe, whole.folder) == [0, 0]
    assert max(_sampled(flux, f"trained{number}", whole.folder, *ranks)) <= levels
    lora = ("lora=last", "lora_scale=0.5")
    assert min(_sampled(flux, f"adapted{number}", whole.folder, *ranks, *lora)) > 1
    pipe.load_lora_weights(adapter.folder / "lora", adapter_name="a")
    pipe.set_adapters(["a"], [0.5])
    assert max(_differences(pipe, flux / f"adapted{number}", "samples")) <= levels


def _sampled(made: Path, name: str, trained: Path, *overrides: str) -> list[int]:
    """Sample the prompts with the weights of a run. Returns: see `_differences`, between the files and the run's."""
    folder = made / name
    given = (f"source={made / 'pipe'}", f"transformer={trained}", f"prompts=[{','.join(PROMPTS)}]", f"run_dir={folder}")
    size = (f"+call.height={HEIGHT}", f"+call.width={WIDTH}", "num_inference_steps=2")
    run_recipe("sample", made, *given, *size, f"output_root={made}", *overrides)
    pictures = [
        [Image.open(x / f"{i:04d}.png") for i in range(2)] for x in (folder / "samples", trained / "samples/final")
    ]
    return [_levels(a, b) for a, b in zip(*pictures)]


def _levels(a: Any, b: Any) -> int:
    """Return the largest difference of two pictures' values of 8 bits."""
    return int(np.abs(np.asarray(a, dtype=int) - np.asarray(b)).max())


def _differences(pipe: Any, folder: Path, pictures: str = "samples/final", other: dict[str, Any] = SECOND) -> list[int]:
    """Return `_levels` between a run's pictures and those of a pipeline. Args: other: second prompt."""
    pipe.set_progress_bar_config(disable=True)
    found = []
    for i, settings in enumerate(({"prompt": PROMPTS[0], "seed": 0}, other)):
        call = {"height": HEIGHT, "width": WIDTH, "num_inference_steps": 2, **settings}
        generator = torch.Generator().manual_seed(call.pop("seed"))
        drawn = pipe(**call, generator=generator).images[0]
        kept = Image.open(folder / pictures / f"{i:04d}.png")
        assert kept.size == (call["width"], call["height"])
        found.append(_levels(drawn, kept))
    return found


@pytest.mark.full
def test_arguments_that_the_pipeline_does_not_take_are_one_error(flux: Path) -> None:
    finished = _tune(flux, "unknown", "lora.rank=4", "strategy=cp", "ring=2", *PICTURES, "+sampling.call.frames=5")
    assert "sampling.call has frames, which is not an argument of FluxPipeline" in error_of(finished)
    refused = _tune(flux, "refused", "lora.rank=4", "strategy=cp", "ring=2", *PICTURES, "+sampling.call.height=-16")
    assert "sampling: the prompts cannot be encoded" in error_of(refused)
