"""Commands and scripts about fine-tuning (LoRA, edits, controls, mixtures) run on tiny pipelines."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.e2e.docs.test_docs_pages import commands, run, write_files
from tests.e2e.finetune.test_table import CALL
from tests.e2e.finetuning import frames_of, write_media, write_pipeline
from tests.e2e.recipe import ROOT
from tests.families.cases import CASES

PAGE = (ROOT / "docs/finetuning.md").read_text()
EDITS, CONTROLS = (ROOT / "docs/control_and_edits.md").read_text().split("## ControlNets and Wan VACE\n")
IMAGE_TO_VIDEO = PAGE.partition("## Image to video\n")[2].partition("\n## ")[0]
WITH_PIPELINE = PAGE.partition("## A model without a pipeline\n")[0].replace(IMAGE_TO_VIDEO, "")
COMMANDS, EDIT_COMMANDS, IMAGE_COMMANDS, CONTROL_COMMANDS = map(
    commands, (WITH_PIPELINE, EDITS, IMAGE_TO_VIDEO, CONTROLS)
)
SMALL = {
    "recipes/precompute.py": ("precompute.sizes=[[32,48]]", "precompute.frames=5", "accelerator=cpu"),
    "recipes/train.py": ("max_steps=2", "batch_size=2", "accelerator=cpu"),
    "recipes/sample.py": (
        "num_inference_steps=1",
        "+call.height=32",
        "+call.width=48",
        "+call.num_frames=5",
        "accelerator=cpu",
    ),
}


@pytest.mark.full
def test_the_three_commands_of_the_start_run(tmp_path: Path) -> None:
    three = commands((ROOT / "docs/start_lora.md").read_text())
    assert three == commands((ROOT / "README.md").read_text())
    write_pipeline(tmp_path / "my-pipeline", "flux")
    write_media(tmp_path / "photos", "flux", 4)
    size = {**SMALL, "recipes/precompute.py": ("precompute.sizes=[[16,24]]", "accelerator=cpu")}
    size["recipes/sample.py"] = ("num_inference_steps=1", "+call.height=16", "+call.width=24", "accelerator=cpu")
    for script, *given in three:
        tiny = [word.replace("black-forest-labs/FLUX.1-dev", "my-pipeline") for word in given]
        run(tmp_path, str(ROOT / script), *tiny, *size[script], "progress=false")
    assert list((tmp_path / "outputs").rglob("lora/comfyui.safetensors"))


@pytest.mark.full
def test_commands_and_script_run(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "my-pipeline", "wan_two_experts")
    write_media(tmp_path / "clips", "wan", 4)
    for script, *given in COMMANDS:
        small = [*SMALL[script], "max_steps=3"] if "resume=last" in given else SMALL[script]
        run(tmp_path, str(ROOT / script), *given, *small, "progress=false")
    write_files("finetuning.md", tmp_path)
    alone, two = (re.findall(r"loss (\S+)", run(tmp_path, "my_finetuning.py", ranks)) for ranks in ("1", "2"))
    assert len(alone) == 3
    assert [float(x) for x in two] == pytest.approx([float(x) for x in alone], rel=1e-4)
    run(tmp_path, "my_pictures.py")
    assert {path.name for path in (tmp_path / "pictures/samples").iterdir()} == {
        "step_00000002.png",
        "step_00000003.png",
    }


@pytest.mark.full
@pytest.mark.parametrize("case", ["wan_image", "cogvideox_image"])
def test_the_commands_for_image_to_video_run(case: str, tmp_path: Path) -> None:
    write_pipeline(tmp_path / "my-i2v-pipeline", case)
    write_media(tmp_path / "clips", case, 4)
    frames, height, width = CASES[case].size
    Image.new("RGB", (2 * width, 2 * height), (200, 40, 40)).save(tmp_path / "photo.png")
    length = ["max_sequence_length=24"] if case == "cogvideox_image" else []  # of the tiny model
    call = [f"height={height}", f"width={width}", f"num_frames={frames}", *length]
    small = {
        "recipes/precompute.py": [f"precompute.sizes=[[{height},{width}]]", f"precompute.frames={frames}"],
        "recipes/train.py": ["max_steps=2", "batch_size=2", *(f"+sampling.call.{value}" for value in length)],
        "recipes/sample.py": ["num_inference_steps=1", *(f"+call.{value}" for value in call)],
    }
    assert [script for script, *_ in IMAGE_COMMANDS] == list(small)
    for script, *given in IMAGE_COMMANDS:
        chosen = [word.replace("finetune_wan", f"finetune_{case.partition('_')[0]}") for word in given]
        run(tmp_path, str(ROOT / script), *chosen, *small[script], "accelerator=cpu", "progress=false")
    (trained,) = (path.parent for path in (tmp_path / "outputs").rglob("metrics.csv"))
    (drawn,) = (path.parent.parent for path in (tmp_path / "outputs").rglob("timings.json"))
    for clip in (trained / "samples/final/0000.gif", *drawn.rglob("samples/0000.gif")):
        with Image.open(clip) as image:
            assert (image.size, image.n_frames) == ((width, height), frames)


@pytest.mark.full
def test_the_commands_for_edit_models_run(tmp_path: Path) -> None:
    size = {"recipes/precompute.py": ("precompute.sizes=[[16,24]]", "accelerator=cpu")}
    size["recipes/train.py"] = SMALL["recipes/train.py"]
    size["recipes/sample.py"] = ("num_inference_steps=1", "accelerator=cpu", *CALL)
    write_pipeline(tmp_path / "my-pipeline", "flux_kontext")
    pairs = write_media(tmp_path / "pairs", "flux_kontext", 4)
    shutil.copy(pairs / "0.reference.png", tmp_path / "photo.png")
    assert [script for script, *_ in EDIT_COMMANDS] == list(size)
    for script, *given in EDIT_COMMANDS:
        run(tmp_path, str(ROOT / script), *given, *size[script], "progress=false")
    (run_folder,) = (path.parent for path in (tmp_path / "outputs").rglob("metrics.csv"))
    assert (run_folder / "lora/pytorch_lora_weights.safetensors").is_file()
    (picture,) = (path for path in (tmp_path / "outputs").rglob("*.png") if path.parent.name == "samples")
    with Image.open(picture) as image:
        assert image.size == (24, 16)


@pytest.mark.full
def test_the_commands_and_scripts_for_controlnets_run(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "my-flux-pipeline", "flux")
    rooms = write_media(tmp_path / "rooms", "flux_controlnet", 4)
    shutil.copy(rooms / "0.reference.png", tmp_path / "depth.png")
    write_files("control_and_edits.md", tmp_path)
    script = tmp_path / "make_controlnet.py"
    script.write_text(script.read_text().replace("layers=4", "layers=1"))
    run(tmp_path, "make_controlnet.py")
    size = {
        "recipes/precompute.py": ("precompute.sizes=[[16,24]]", "accelerator=cpu"),
        "recipes/train.py": SMALL["recipes/train.py"],
        "recipes/sample.py": ("num_inference_steps=1", "accelerator=cpu", "+call.height=16", "+call.width=24"),
    }
    assert [script for script, *_ in CONTROL_COMMANDS] == list(size)
    for name, *given in CONTROL_COMMANDS:
        run(tmp_path, str(ROOT / name), *given, *size[name], "progress=false")
    (run_folder,) = (path.parent for path in (tmp_path / "outputs").rglob("metrics.csv"))
    script = tmp_path / "draw_controlled.py"
    script.write_text(script.read_text().replace('"height": 512, "width": 768', '"height": 16, "width": 24'))
    run(tmp_path, "draw_controlled.py", str(run_folder))
    with Image.open(tmp_path / "kitchen.png") as image:
        assert image.size == (24, 16)


@pytest.mark.full
def test_the_commands_for_a_mixture_run(tmp_path: Path) -> None:
    page = (ROOT / "docs/mixtures_and_sweeps.md").read_text().partition("## Sweeps\n")[0]
    write_pipeline(tmp_path / "my-pipeline", "flux")
    for number, folder in enumerate(("photos", "styles")):
        (tmp_path / folder).mkdir()
        for i in range(4):
            height, width = ((32, 48), (48, 32), (48, 48))[(i + number) % 3]
            Image.fromarray(frames_of(i, (1, height, width))[0]).save(tmp_path / folder / f"{i}.png")
            (tmp_path / folder / f"{i}.txt").write_text("a wave")
    write_files("mixtures_and_sweeps.md", tmp_path)
    small = ("accelerator=cpu", "progress=false", "lora.rank=2")
    precompute, train, resume, degrees = commands(page)
    sizes = "precompute.sizes=[[32,48],[48,32],[48,48]]"
    run(tmp_path, str(ROOT / precompute[0]), *precompute[1:-1], sizes, "accelerator=cpu", "precompute.max_upscale=2")
    run(tmp_path, str(ROOT / train[0]), *train[1:], *small, "max_steps=2")
    resumed = run(tmp_path, str(ROOT / resume[0]), *resume[1:], *small, "max_steps=4")
    assert "Resuming after step 2" in resumed
    assert "ring 2 × ulysses 2" in resumed
    assert "data 1 × ring 2 × ulysses 2" in run(tmp_path, str(ROOT / degrees[0]), *degrees[1:], *small, "max_steps=2")
