import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers  # noqa: F401  (this and the next set environment variables, which a test must not)
import pytest
import sklearn.svm  # noqa: F401
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf, open_dict

import lightning_cp
from lightning_cp.fabric import ContextParallelFSDPStrategy, ContextParallelStrategy
from lightning_cp.launch import Machine
from lightning_cp.recipes import console
from lightning_cp.recipes.console import COMMANDS
from lightning_cp.recipes.runs.command import conf_dir
from lightning_cp.recipes.runs.recipe import check_config
from lightning_cp.recipes.sampling.step_cache import enable_cache
from lightning_cp.recipes.settings.known import KnownSettings
from lightning_cp.recipes.settings.table import SettingsError
from lightning_cp.strategies.mixin import ContextParallelMixin
from tests.harness.cases import and_others
from tests.unit.recipes.composed import CONF, composed

ROOT = CONF.parent


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def resolved(*overrides: str) -> DictConfig:
    return check_config(composed("train", "run_dir=/runs/here", *overrides), Machine(cores=2), None).config


@pytest.mark.parametrize("name", options("strategy"))
def test_every_strategy_is_built(name: str) -> None:
    strategy = instantiate(resolved(f"strategy={name}").strategy)
    if name == "single":
        assert strategy == "auto"
    else:
        kinds = {"cp": ContextParallelStrategy, "cp_fsdp": ContextParallelFSDPStrategy}
        assert type(strategy) is kinds[name]


@pytest.mark.parametrize("name", options("trainer"))
def test_every_trainer_is_built(name: str) -> None:
    built = instantiate(resolved(f"trainer={name}", "strategy=cp").trainer)
    assert built.world_size == 1
    assert built.strategy.root_device == torch.device("cpu")
    assert isinstance(built, Trainer if name == "lightning" else Fabric)
    assert isinstance(built.strategy, ContextParallelMixin)


@pytest.mark.parametrize(("model", "data"), [("flux_tiny", "digits"), ("wan_tiny", "moving_digits")])
def test_every_model_takes_every_data(model: str, data: str) -> None:
    config = resolved(f"model={model}", f"data={data}")
    dataset, module = instantiate(config.data.dataset), instantiate(config.model)
    pixels, label = dataset[0]
    assert len(dataset) == config.data.num_samples
    assert dataset.sample_shape == tuple(pixels.shape)
    assert dataset.sample_shape == (config.data.channels, config.data.frames, config.data.height, config.data.width)
    assert config.data.token_width == config.data.channels * math.prod(config.data.patch_size)
    with torch.no_grad():
        velocity = module(pixels[None], torch.tensor([0.5]), torch.tensor([label]))
    assert velocity.shape == pixels[None].shape


def test_the_larger_model_is_built() -> None:
    module = instantiate(resolved("model=wan_small", "data=moving_digits").model)
    assert 10e6 < sum(p.numel() for p in module.parameters()) < 30e6


@pytest.mark.parametrize("name", options("cache"))
def test_every_step_cache_is_enabled(name: str) -> None:
    settings = composed("sample", f"cache={name}").cache
    transformer: Any = instantiate(resolved().model).transformer
    enable_cache(settings, [transformer], lambda: 500.0)
    assert type(transformer._cache_config).__name__ == settings._target_.rpartition(".")[2]
    with pytest.raises(ValueError, match="diffusers has no step caches for Linear"):
        enable_cache(settings, [torch.nn.Linear(1, 1)], lambda: 500.0)


def test_a_step_cache_that_matches_no_module_is_refused() -> None:
    settings = {"_target_": "diffusers.TaylorSeerCacheConfig", "cache_identifiers": ["nowhere"]}
    with pytest.raises(ValueError, match="no module of WanTransformer3DModel matches TaylorSeerCacheConfig"):
        enable_cache(settings, [instantiate(resolved().model).transformer], lambda: 500.0)


@pytest.mark.parametrize("name", options("optim"))
def test_every_optimizer_is_built(name: str) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")  # not in the extra dev: its import starts threads, before tests fork
    # Muon is refused without adapters
    settings: Any = OmegaConf.load(CONF / "optim/muon.yaml") if name == "muon" else resolved(f"optim={name}").optim
    optimizer = instantiate(settings, params=[torch.nn.Parameter(torch.ones(2, 2))])
    assert optimizer.param_groups[0]["lr"] == settings.lr


@pytest.mark.parametrize("names", and_others(options("experiment"), 4))
@pytest.mark.default(4)
def test_every_experiment_begins_with_its_command_and_composes(names: list[str]) -> None:
    for name in names:
        _check_experiment(name)


def _check_experiment(name: str) -> None:
    lines = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"  # Hydra needs it first
    fine_tunes = name.startswith("finetune")
    settings = " model.pretrained=my-pipeline data.path=latents" if fine_tunes else ""
    assert lines[1] == f"# lightning-cp train experiment={name}{settings}"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", overrides=[f"experiment={name}", "run_dir=/runs/here"], return_hydra_config=True)
    known, plain = KnownSettings(CONF, "train", config.hydra.runtime.choices), OmegaConf.to_container(config)
    assert known.unknown(plain) == []
    with open_dict(config):
        del config["hydra"]
    if fine_tunes:
        with pytest.raises(SettingsError, match=r"^model\.pretrained must be given, for example"):
            check_config(config, FourGpus(cores=2), None)
        return
    assert check_config(config, FourGpus(cores=2), None).world.size > 1


class FourGpus(Machine):
    gpus = 4


def test_every_file_is_short_and_begins_with_a_description() -> None:
    for path in CONF.rglob("*.yaml"):
        lines = path.read_text().splitlines()
        assert lines[0].startswith("# "), path
        assert len(lines) <= 120, path
        OmegaConf.load(path)  # a text with ": " that is not quoted is no valid YAML


def test_help_lists_every_setting() -> None:
    shown = run_recipe("--help").stdout
    listed = {word for line in shown.splitlines() if line.startswith("  ") for word in line.replace(",", " ").split()}
    keys = [key for key in leaves(resolved(), "") if not key.endswith("_target_")]
    missing = [key for key in keys if not any(part in listed for part in prefixes(key))]
    assert missing == []
    for group in ("strategy", "trainer", "data", "model", "experiment"):
        assert f"{group}: {', '.join(options(group))}" in shown


def leaves(node: Any, prefix: str) -> list[str]:
    if not OmegaConf.is_dict(node):
        return [prefix]
    return [leaf for key in node for leaf in leaves(node[key], f"{prefix}.{key}".lstrip("."))]


def prefixes(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def run_recipe(*arguments: str, recipe: Path = ROOT / "recipes" / "train.py", cwd: Path | None = None) -> Any:
    code = "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); sys.argv.pop(0); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", code, json.dumps(sys.path), str(recipe), *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=cwd,
    )


def test_the_recipe_finds_its_settings_in_a_clone() -> None:
    assert conf_dir() == str(CONF)


@pytest.fixture
def foreign_project(tmp_path: Path) -> Path:
    """Another project's folder, with an installed lightning_cp: its conf is the package lightning_cp.conf."""
    installed = tmp_path / "site" / "lightning_cp"
    shutil.copytree(ROOT / "lightning_cp", installed, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(CONF, installed / "conf", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "conf").mkdir()
    (tmp_path / "app.py").write_text(
        "import hydra\nfrom omegaconf import OmegaConf\n"
        "@hydra.main(version_base='1.3', config_path='conf', config_name='app')\n"
        "def main(config):\n    print(OmegaConf.to_yaml(config, resolve=True))\n"
        "main()\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("default", "where"),
    [
        ("/lightning_cp/strategy: cp", "lightning_cp.strategy"),
        ("/lightning_cp/strategy@engine.strategy: cp", "engine.strategy"),
        ("/strategy: cp", "strategy"),
    ],
)
@pytest.mark.default(1)
def test_another_project_uses_our_strategy(default: str, where: str, foreign_project: Path) -> None:
    (foreign_project / "conf" / "app.yaml").write_text(
        f"defaults:\n  - {default}\n  - _self_\n"
        "hydra: {searchpath: ['pkg://lightning_cp.conf'], output_subdir: null, run: {dir: .}}\n"
    )
    printed = run_in(foreign_project, "app.py", f"{where}.ring=3")
    strategy = OmegaConf.select(OmegaConf.create(printed), where)
    assert strategy._target_ == "lightning_cp.fabric.ContextParallelStrategy"
    assert (strategy.ring, strategy.ulysses, strategy.data_parallel) == (3, 1, "auto")


def test_a_copied_recipe_runs_on_the_installed_settings(foreign_project: Path) -> None:
    recipe = shutil.copy(ROOT / "recipes" / "train.py", foreign_project / "mine.py")
    printed = run_in(foreign_project, str(recipe), "--cfg", "job", "experiment=unified")
    assert OmegaConf.create(printed).ulysses == 2


@pytest.mark.parametrize(
    "commands", and_others(("check-family", "train", "sample", "precompute", "plan", "check", "bench"))
)
@pytest.mark.default(1)
def test_an_installed_command_prints_its_settings(commands: list[str], foreign_project: Path) -> None:
    """A stranger's folder `conf` beside the package is not used."""
    (foreign_project / "site" / "conf").mkdir()
    (foreign_project / "site" / "conf" / "train.yaml").write_text("wrong: true\n")
    for command in commands:
        printed = run_in(foreign_project, "-m", "lightning_cp.recipes.console", command, "--cfg", "job")
        assert "wrong" not in printed
        assert len(OmegaConf.create(printed)) > 3


def test_the_console_lists_its_commands_and_refuses_others() -> None:
    start = [sys.executable, "-m", "lightning_cp.recipes.console"]
    listed = subprocess.run([*start, "--help"], capture_output=True, text=True, timeout=150, check=True)
    assert all(f"  {command} " in listed.stdout for command in COMMANDS)
    refused = subprocess.run([*start, "fly"], capture_output=True, text=True, timeout=150)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: 'fly' is no command of lightning-cp: use one of train, sample")
    misspelt = subprocess.run([*start, "trian"], capture_output=True, text=True, timeout=150)
    assert "did you mean train?" in misspelt.stderr
    version = subprocess.run([*start, "--version"], capture_output=True, text=True, timeout=150, check=True)
    assert version.stdout == f"lightning-cp {lightning_cp.__version__}\n"


def test_compare_has_help_and_no_settings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, shown in ((["--help"], 0, "lightning-cp compare"), (["ranks=2"], 2, "ranks=2 is not valid")):
        monkeypatch.setattr(sys, "argv", ["lightning-cp", "compare", *arguments])
        assert console.main() == code
        printed = capsys.readouterr()
        assert shown in (printed.out if code == 0 else printed.err)


def test_a_command_without_its_packages_names_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-cp", "doctor"])
    monkeypatch.delitem(sys.modules, "lightning_cp.recipes.doctor", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert console.main() == 2
    assert capsys.readouterr().err == (
        "error: lightning-cp doctor needs the package rich, which is not installed: pip install 'rich>=13'\n"
    )


def run_in(project: Path, *arguments: str) -> str:
    """Output of a script in a project that has us installed."""
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env={"PYTHONPATH": str(project / "site"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
