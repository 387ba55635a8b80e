"""Settings of recipes/sample.py: what is sampled, and what is refused before ranks start."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_cp.launch import Machine
from lightning_cp.recipes.runs.recipe import CheckedRun
from lightning_cp.recipes.runs.sampling import check_sampling
from lightning_cp.recipes.settings.table import SettingsError
from lightning_cp.recipes.settings.trained import TrainedDenoiser
from tests.unit.recipes.composed import composed


class NoGpu(Machine):
    gpus = 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs (of clips, of pictures, and one that did not end), pipelines and a list."""
    folder = tmp_path_factory.mktemp("runs")
    config = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 4}
    for name, frames in (("bare", None), ("clips", 8), ("run", 1)):
        (folder / name / "transformer").mkdir(parents=True)
        (folder / name / "transformer/config.json").write_text(json.dumps(config))
        if frames is not None:
            TrainedDenoiser("WanDenoiser", 10, 4, None, (1, frames, 8, 8), True, 10, 8, 2.0).write(folder / name)
            os.utime(folder / name / "denoiser.json", (frames == 1, frames == 1))
    for name, index in {
        "pipe": {},
        "wan": {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]},
        "dit": {"_class_name": "DiTPipeline"},
    }.items():
        (folder / name).mkdir()
        (folder / name / "model_index.json").write_text(json.dumps(index))
    (folder / "a list.txt").write_text("a cat\n")
    for name in ("lora", "other", "best/lora"):
        (folder / name).mkdir(parents=True)
        (folder / name / "pytorch_lora_weights.safetensors").touch()
    for name, kind in (("transformer", "WanTransformer3DModel"), ("transformer_2", "FluxTransformer2DModel")):
        (folder / "wan" / name).mkdir()
        (folder / "wan" / name / "config.json").write_text(json.dumps({"_class_name": kind, "n_heads": 4}))
    return folder


@pytest.fixture
def root(runs: Path, tmp_path: Path) -> Path:
    """A copy of it, with a named pipe."""
    copy = Path(shutil.copytree(runs, tmp_path / "runs"))
    os.mkfifo(copy / "fifo.txt")
    return copy


def check(root: Path, *overrides: str) -> CheckedRun:
    given = [override.replace("ROOT", str(root)) for override in overrides]
    return check_sampling(
        composed("sample", f"output_root={root}", f"run_dir={root}/out", *given), NoGpu(cores=2), None
    )


@pytest.mark.parametrize(
    ("source", "run", "pipeline"),
    [
        ("ROOT/run", "run", None),
        ("last", "run", None),  # the newest one
        ("ROOT/pipe", None, "pipe"),
        ("someone/something", None, "someone/something"),
    ],
)
def test_a_source_is_a_folder_or_an_id(root: Path, source: str, run: str | None, pipeline: str | None) -> None:
    config = check(root, f"source={source}", *([] if run else ["prompts=a cat"])).config
    assert config.run == (run and str(root / run))
    assert (config.pipeline and config.pipeline.removeprefix(f"{root}/")) == pipeline
    assert (config.trained is None) == (run is None)


@pytest.mark.parametrize(
    ("source", "asked", "prompts"),
    [
        ("run", "null", None),
        ("run", "0", [0]),
        ("run", "[3,0]", [3, 0]),
        ("dit", "0", [0]),
        ("wan", "a cat", ["a cat"]),
        ("wan", "[a cat,'7']", ["a cat", "7"]),
        ("wan", "cats/dogs on a roof", ["cats/dogs on a roof"]),
        ("wan", "[none.txt]", ["none.txt"]),
        ("wan", "cat" * 200, ["cat" * 200]),
        ("wan", "ROOT/a list.txt", "ROOT/a list.txt"),
        ("pipe", "[1,a cat]", [1, "a cat"]),
    ],
)
def test_prompts_are_a_list_or_a_file(root: Path, source: str, asked: str, prompts: Any) -> None:
    expected = prompts.replace("ROOT", str(root)) if isinstance(prompts, str) else prompts
    assert check(root, f"source=ROOT/{source}", f"prompts={asked}").config.prompts == expected


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"denoiser": "os.system"}, "denoiser='os.system' must be one of WanDenoiser, FluxDenoiser"),
        ({"denoiser": {"_target_": "os.system"}}, "denoiser={'_target_': 'os.system'} must be one of"),
        ({"denoiser": "FluxDenoiser"}, "transformer has a WanTransformer3DModel, but FluxDenoiser needs another class"),
        ({"_target_": "os.system"}, "must have the keys denoiser, .*, got _target_, denoiser"),
        ({"num_classes": "ten"}, "num_classes='ten' must be a whole number"),
        ({"size": [1, 1, 8]}, r"size=\[1, 1, 8\] must be a list of 4"),
        ({"guidance_scale": float("nan")}, "guidance_scale=nan must be a number"),
    ],
    ids=str,
)
def test_a_run_of_a_stranger_names_no_code(root: Path, change: dict[str, Any], told: str) -> None:
    file = root / "run/denoiser.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(SettingsError, match=f"^source={root}/run: .*{told}"):
        check(root, "source=ROOT/run")


def test_damaged_files_of_a_run_are_named(root: Path) -> None:
    (root / "clips/transformer/config.json").unlink()
    (root / "run/denoiser.json").write_text("[" * 10**5)
    for name, told in (("clips", "config.json cannot be read: No such file"), ("run", "JSON is nested too deeply")):
        with pytest.raises(SettingsError, match=told):
            check(root, f"source=ROOT/{name}")


def test_branches_are_data_groups_to_the_strategy_and_ranks_of_the_world(root: Path) -> None:
    run = check(root, "source=ROOT/run", "strategy=cp", "ring=2", "cfg=2", "data_parallel=2")
    assert run.world.size == 8
    assert run.config.strategy.data_parallel == 4
    assert run.config.data_parallel == 2
    assert check(root, "source=ROOT/run", "strategy=cp", "cfg=2", "devices=4").config.data_parallel == 2


def test_mp4_needs_what_writes_it_before_anything_starts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(root, "source=ROOT/run", "format=mp4").config.format == "mp4"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"format=mp4 needs imageio"):
        check(root, "source=ROOT/run", "format=mp4")


@pytest.mark.parametrize(
    ("given", "scales"),
    [((), [1.0, 1.0]), (("lora_scale=0.5",), [0.5, 0.5]), (("lora_scale=[0.8,-1]",), [0.8, -1])],
    ids=str,
)
def test_adapters_are_files_with_a_strength_each(root: Path, given: tuple[str, ...], scales: list[float]) -> None:
    found = check(root, "source=ROOT/pipe", "prompts=a", "lora=[last,ROOT/other]", *given).config
    files = [f"{root}/{name}/pytorch_lora_weights.safetensors" for name in ("lora", "other")]
    assert (found.lora, found.lora_scale) == (files, scales)
    found = check(root, "source=ROOT/run", "lora=ROOT/other").config
    assert (found.lora, found.lora_scale) == (files[1:], [1.0])


def test_trained_models_are_folders_by_component(root: Path) -> None:
    given = ("source=some/thing", "prompts=a")
    expected = {name: f"{root}/wan/{name}" for name in ("transformer", "transformer_2")}
    assert check(root, *given, "transformer=ROOT/wan").config.transformer == expected
    assert check(root, *given, "transformer=last").config.transformer == expected
    one = check(root, *given, "transformer=ROOT/wan/transformer_2").config.transformer
    assert one == {"transformer_2": expected["transformer_2"]}
    assert check(root, *given).config.transformer is None


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["source=ROOT/run", "lora_scale=0.5"], "lora_scale=0.5 has no effect without an adapter: set lora"),
        (["source=ROOT/run", "lora=[ROOT/lora,ROOT/other]", "lora_scale=[1]"], r"lora_scale=\[1\] is not valid: must"),
        (["source=ROOT/run", "lora=last", "lora_scale=a"], "lora_scale=a is not valid: must be a number, or a list"),
        (["source=ROOT/run", "lora=[last,ROOT/lora]"], "last is listed twice; set its strength in lora_scale"),
        (["source=ROOT/run", "lora=[]"], r"lora=\[\] is not valid: must be last, the path of an adapter, or several"),
        (["source=ROOT/wan", "prompts=a", "transformer=last", "output_root=ROOT/lora"], "transformer=last found no"),
        (["source=ROOT/run", "lora=ROOT/pipe"], "pipe has no pytorch_lora_weights.safetensors"),
        (["source=ROOT/run", "transformer=last"], "transformer=last applies to pipelines only"),
        (["source=ROOT/wan", "prompts=a", "transformer=ROOT/lora"], "lora has no trained model: it must be last, the"),
        (["source=ROOT/wan", "prompts=a", "transformer=ROOT/wan"], "transformer_2 has a FluxTransformer2DModel, which"),
        (["source=nowhere"], "source=nowhere does not exist: must be `last`"),
        (["source=ROOT/out"], "source=.*out does not exist"),
        (["source=ROOT/bare"], r"source=.*bare has no denoiser.json: .* use source=<its pipeline> lora=.*bare or"),
        (["source=ROOT/pipe"], "prompts must be set for a pipeline"),
        (["source=ROOT/pipe", "prompts=a", "precision=bf16-mixed"], "precision=bf16-mixed is not valid for a pipeline"),
        (["source=ROOT/pipe", "prompts=a", "image=none.png"], "image=none.png does not exist"),
        (["source=ROOT/pipe", "prompts=a", "cfg=2"], "strategy=single is one process, so cfg=2 must be 1"),
        (["source=ROOT/run", "strategy=cp", "cfg=3"], "cfg=3 is not valid: must be at most 2"),
        (["source=ROOT/run", "prompts=[12]"], r"prompts=\[12\] is not valid: prompts of this run must be classes"),
        (["source=ROOT/run", "prompts=a cat"], "prompts of this run must be classes"),
        (["source=ROOT/run", "image=x.png"], "image=x.png applies to pipelines only"),
        (["source=ROOT/run", "shard=[transformer]"], r"shard=\['transformer'\] applies to pipelines only"),
        (["source=ROOT/run", "+call.height=8"], r"call=\{'height': 8\} applies to pipelines only"),
        (["source=ROOT/run", "negative_prompt=x"], "negative_prompt=x applies to pipelines only"),
        (["source=ROOT/run", "stages=offload"], "stages=offload applies to pipelines only"),
        (["source=ROOT/run", "vae=false"], "vae=false applies to pipelines only"),
        (["source=ROOT/run", "per_call=2"], "per_call=2 applies to pipelines only"),
        (["source=ROOT/run", "prompts=[]"], r"prompts=\[\] is not valid: give at least one prompt"),
        (["source=ROOT/run", "format=wav"], "format=wav .* of this run are pictures: must be one of auto, png"),
        (["source=ROOT/clips", "format=wav"], "format=wav .* are clips of 8 frames: must be one of auto, gif, mp4"),
        (["source=ROOT/pipe", "prompts=[]"], r"prompts=\[\] is not valid: give at least one prompt"),
        (["source=ROOT/pipe", "prompts=''"], "prompts must be set for a pipeline"),
        (["source=ROOT/pipe", "prompts=no file.txt"], "no file.txt looks like a path, but it does not exist; .* use a"),
        (["source=ROOT/pipe", "prompts=ROOT/fifo.txt"], r"fifo\.txt looks like a path, but it is a named pipe"),
        (["source=ROOT/pipe", "prompts=a", "image=ROOT"], "is a folder: must be the path of an image file"),
        (["source=ROOT/pipe", "prompts=ROOT/prompts"], "/prompts looks like a path"),
        (["source=ROOT/wan", "prompts=[1,2]"], r"prompts=\[1, 2\] is not valid: prompts of WanPipeline must be texts"),
        (["source=ROOT/wan", "prompts=a", "strategy=cp", "ulysses=5"], "ulysses=5 .* at most 4, the attention heads"),
        (["source=ROOT/dit", "prompts=[1,a cat]"], "prompts of DiTPipeline must be classes, whole numbers"),
        (["source=ROOT/dit", "prompts=[-1]"], "prompts of DiTPipeline must be classes"),
        (["source=ROOT/dit", "prompts=ROOT/a list.txt"], "prompts of DiTPipeline must be classes"),
        (["source=some/thing", "prompts=[a cat,1.5]"], "prompts of a pipeline must be texts"),
        (["source=ROOT/pipe", "prompts=a", "image=ROOT/a list.txt", "per_call=2"], "per_call=2 is not valid with an"),
        (["source=ROOT/run", "strategy=cp", "ulysses=5"], "ulysses=5 is not valid: must be at most"),
        (["source=ROOT/run", "strategy=cp", "cfg=2", "devices=3"], "cfg=2 = 2 must divide devices=3"),
        (["source=ROOT/run", "kernel=cudnn", "strategy=cp"], "kernel=cudnn is not valid on CPU"),
    ],
)
def test_settings_that_cannot_be_sampled_are_refused_by_name(root: Path, overrides: list[str], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        check(root, *overrides)
