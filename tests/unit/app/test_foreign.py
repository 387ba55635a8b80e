"""Configurations of runs from untrusted authors: which are read, and which raise an error."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_cp.app.runs.recipe import check_config
from lightning_cp.app.settings.foreign import read_foreign_run
from lightning_cp.app.settings.table import SettingsError
from lightning_cp.launch import Machine

CONF = Path(__file__).parents[3] / "conf"
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem != "pretrained")


def trained(*overrides: str) -> dict[str, Any]:
    """A run's resolved configuration."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", overrides=["run_dir=here", *overrides])
    made: Any = OmegaConf.to_container(check_config(config, Machine(cores=2), None).config)
    return made


def written(folder: Path, config: object) -> Path:
    path = folder / "resolved.yaml"
    path.write_text(config) if isinstance(config, str) else OmegaConf.save(OmegaConf.create(config), path)
    return path


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return trained()


def changed(plain: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    config: Any = OmegaConf.create(plain)
    OmegaConf.update(config, key, value, force_add=True, merge=False)
    made: Any = OmegaConf.to_container(config)
    return made


@pytest.mark.parametrize("strategy", ["single", "cp_fsdp"])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_that_comes_with_us_is_read_without_trust(model: str, strategy: str, tmp_path: Path) -> None:
    config = trained(f"model={model}", f"strategy={strategy}")
    read = OmegaConf.to_container(read_foreign_run(written(tmp_path, config)))
    assert isinstance(read, dict)
    assert read["model"] == config["model"]
    assert read["sampling"] == {
        key: config["sampling"][key] for key in ("num_samples", "num_inference_steps", "guidance_scale")
    }
    assert read["data"] == {key: value for key, value in config["data"].items() if key != "dataset"}
    assert read.keys() == {"model", "data", "sampling"}  # nothing that sampling does not need


CALLED = [
    ("model._target_", "lightning_cp.launch.rank.load_target"),
    ("model._target_", "os.system"),
    ("model._target_", "lightning_cp.app.denoisers.WanDenoiser.__init__"),
    ("model._target_", ["lightning_cp.app.denoisers.WanDenoiser"]),
    ("model._target_", None),
    ("model.transformer._target_", "builtins.eval"),
    ("model.transformer._target_", "diffusers.FluxTransformer2DModel.from_pretrained"),
    ("model.transformer.norm", {"_target_": "subprocess.run", "args": ["touch", "x"]}),
    ("model._args_", [{"_target_": "runpy.run_path", "path_name": "x.py"}]),
    ("model.transformer.patch_size", [1, [{"deeper": {"_target_": "hydra.utils.get_method", "path": "os.system"}}]]),
]


@pytest.mark.parametrize(("key", "value"), CALLED, ids=[f"{key}={value}" for key, value in CALLED])
def test_a_class_or_function_that_is_not_listed_needs_trust(
    plain: dict[str, Any], key: str, value: object, tmp_path: Path
) -> None:
    path = written(tmp_path, changed(plain, key, value))
    with pytest.raises(SettingsError, match=r"_target_=.* would be called, .* Set trust=true if you trust") as caught:
        read_foreign_run(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    if isinstance(value, str):
        assert f"{key}={value} would be called" in str(caught.value)
        assert OmegaConf.select(read_foreign_run(path, trust=True), key) == value


def test_what_sampling_does_not_build_is_not_passed_on(plain: dict[str, Any], tmp_path: Path) -> None:
    config = changed(plain, "trainer._target_", "os.system")
    for key in ("data.dataset._target_", "optim._target_", "strategy._target_", "data.channel_names._target_"):
        config = changed(config, key, "os.system")
    assert "os.system" not in OmegaConf.to_yaml(read_foreign_run(written(tmp_path, config)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.transformer.freq_dim", "${oc.env:HOME}"),
        ("data.channels", "${data.frames}"),
        ("optim.note", "see ${oc.env:SECRET}"),
        ("data.patch_size", [1, 1, "${oc.decode:'${oc.env:X}'}"]),
    ],
)
def test_an_interpolation_is_refused_at_any_depth(
    plain: dict[str, Any], key: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=rf"{key}.*is an interpolation, .*Set trust=true"):
        read_foreign_run(written(tmp_path, changed(plain, key, value)))


def test_an_interpolation_in_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"\$\{x\}=1 is an interpolation"):
        read_foreign_run(written(tmp_path, "model:\n  ${x}: 1\n"))


DAMAGED = [
    ("", "expected a mapping, got NoneType"),
    ("[1, 2]", "expected a mapping, got list"),
    ("model: [1", "is damaged: while parsing"),
    ("model: \xff", "is damaged: 'utf-8' codec"),
    ("a: &x 1\nb: *x\n", "must have no YAML anchor, got x"),
    ("a: *x\n", "must have no YAML anchor, got x"),
    ("model: !!python/object/apply:os.system [ls]\n", "must have no YAML tag"),
    ("model: !!str 1\n", "must have no YAML tag"),
    ("model: 2001-01-01\n", "model=2001-01-01 must be a string"),
    ("model: 2001-99-01\n", "is damaged: month must be"),
    ("model: {3: 4}\n", "model has the key 3; keys must be strings"),
    (f"model: {'9' * 5000}\n", "is damaged: Exceeds the limit"),
    ("[" * 3000 + "]" * 3000, "at most 16 levels"),
    ("a: [" + "1," * 6000 + "]", "at most 16 levels and 5000 keys"),
    ("a: " + "b" * (1 << 18), "more than 262144 bytes"),
    ("model: {_target_: lightning_cp.app.denoisers.WanDenoiser}\n", "it lacks data.channels, data.frames"),
]


@pytest.mark.parametrize(("text", "said"), DAMAGED, ids=[said[:30] for _, said in DAMAGED])
@pytest.mark.parametrize("trust", [False, True])
def test_a_damaged_file_is_one_error_also_with_trust(text: str, said: str, trust: bool, tmp_path: Path) -> None:
    path = tmp_path / "resolved.yaml"
    path.write_bytes(text.encode("latin-1"))
    started = time.process_time()
    with pytest.raises(SettingsError, match=said) as caught:
        read_foreign_run(path, trust=trust)
    assert time.process_time() - started < 20  # CPU time: other programs do not change it
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("data.num_classes", "ten", "data.num_classes=ten is not valid: must be a whole number"),
        ("model.transformer.axes_dims_rope", "abc", "axes_dims_rope=abc is not valid: must be a list of 3"),
        ("sampling.guidance_scale", None, "sampling.guidance_scale"),
        ("model.num_tokens", "???", "Missing mandatory value: .*model.num_tokens"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(
    plain: dict[str, Any], key: str, value: object, said: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=said):
        read_foreign_run(written(tmp_path, changed(plain, key, value)))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is not a file"):
        read_foreign_run(tmp_path)


@pytest.mark.parametrize("setting", ["transformer", "lora"])
def test_a_finetuning_names_the_setting_for_its_weights(tmp_path: Path, setting: str) -> None:
    config = {"model": {"pretrained": "base"}, "lora": None if setting == "transformer" else {"rank": 4}}
    with pytest.raises(SettingsError, match=r"is a fine-tuning of base, which is not a pipeline: use ") as raised:
        read_foreign_run(written(tmp_path, config))
    assert f"use source=base {setting}={tmp_path.parent}" in str(raised.value)
