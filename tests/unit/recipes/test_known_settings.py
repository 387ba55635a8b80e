"""A setting that no configuration file has is refused on every command, with the names that were probably meant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lightning_cp.recipes.runs.command import conf_dir, with_home
from lightning_cp.recipes.settings.components import check_transformers
from lightning_cp.recipes.settings.known import KnownSettings
from lightning_cp.recipes.settings.table import SettingsError

CONF = Path(__file__).parents[3] / "conf"
TUNING = "model=pretrained data=latents sampling=prompts model.pretrained=a data.path=b"


def unknown(name: str, overrides: str, part: str = "") -> list[str]:
    """Return the errors for the unknown settings of a command."""
    with initialize_config_dir(conf_dir(part), version_base="1.3"):
        config: Any = compose(name, overrides.split(), return_hydra_config=True)
    known = KnownSettings(CONF / part, name, config.hydra.runtime.choices)
    plain: Any = OmegaConf.to_container(config)
    return [str(known.error(key, name)) for key in known.unknown(plain)]


@pytest.mark.parametrize(("name", "part"), [("train", ""), ("sample", ""), ("plan", "plan"), ("bench", "bench")])
@pytest.mark.default(1)
def test_a_setting_that_was_removed_is_named(name: str, part: str) -> None:
    known = KnownSettings(CONF / part, name, {})
    given = {key: 1 for key, x in known._primary.items() if not isinstance(x, (dict, list))}
    assert known.removed(given) == []
    assert given
    for key in given:
        assert known.removed({other: 1 for other in given if other != key}) == [key]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("+rin=2", r"rin is not a setting of train: did you mean ring.*\? Values of your own .*: \+extra\.rin=…"),
        ("++max_step=2", "did you mean max_steps"),
        ("+lr=0.1", r"did you mean optim\.lr\?"),
        ("+sampling.evry=3", r"sampling\.evry is not a setting of train: did you mean sampling\.every"),
        ("+qqqqq=1", "`train --help` lists the settings"),
        ("+lora.rank=8", "lora is not a setting of train with these groups: it belongs to model=pretrained"),
        ("+logger.project=x", "it belongs to logger=wandb"),
        ("+strategy.ring=2", "it belongs to strategy=cp"),
        (f"{TUNING} +data.caption=optional", r"did you mean data\.captions"),
        (f"{TUNING} +lora.rnk=8", r"did you mean lora\.rank"),
        # known, or read by others
        ("+extra.rin=2 +extra.a.b=1", None),
        ("strategy=cp strategy.check_peers=off +optim.amsgrad=true +model.transformer.eps=1 +trainer.x=1", None),
        (f"{TUNING} lora.ranks={{to_q:8}} +sampling.call.height=16 +degrees.by_tokens.64=1 lora=null", None),
        ("optim=adamw_fused launcher=slurm logger=tensorboard", None),
    ],
)
@pytest.mark.default(4)
def test_an_unknown_setting_of_train_is_refused_by_name(overrides: str, expected: str | None) -> None:
    if expected is None:
        assert unknown("train", overrides) == []
    else:
        with pytest.raises(SettingsError, match=expected):
            raise SettingsError(*unknown("train", overrides))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("sample", "source=a +call.height=8"),
        ("precompute", "model.pretrained=a data.path=b"),
        ("plan", "model=flux_dev +config.num_layers=4 +models.mine.class=X +gpu.tflops=3"),
        *(("bench", f"bench={path.stem}") for path in sorted((CONF / "bench/bench").glob("*.yaml"))),
        ("check", "model=a.py"),
        ("check_family", "pretrained=a"),
    ],
)
@pytest.mark.default(3)
def test_no_known_setting_of_the_other_commands_is_refused(name: str, overrides: str) -> None:
    part = "" if name == "sample" else name
    assert unknown(name, f"{overrides} +hydra.job.chdir=false", part) == []
    assert len(unknown(name, f"{overrides} +qqq=1", part)) == 1


def test_the_users_own_groups_may_add_settings(tmp_path: Path) -> None:
    (tmp_path / "mix").mkdir()
    (tmp_path / "mix/two.yaml").write_text("weights: [1, 2]\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.yaml").write_text("kind: latents\npath: x\nvalidaton: 3\n")
    assert unknown("train", f"hydra.searchpath=[{tmp_path}] +mix=two") == []
    (error,) = unknown("train", f"hydra.searchpath=[{tmp_path}] data=mine")
    assert "data.validaton is not a setting of train: did you mean data.validation" in error


def test_a_home_folder_is_found_in_all_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/me")
    given = {"a": "~/x", "b": [{"path": "~/y"}], "c": "???", "e": "~z", "f": 1}
    assert with_home(given) == {"a": "/me/x", "b": [{"path": "/me/y"}], "c": "???", "e": "~z", "f": 1}


SCRIPT = """
import sys
from lightning_cp.recipes import console
for name, setting in [("train", "rin=2"), ("train", "+rin=2"), ("train", "optin=adamw"), ("sample", "+rin=2"),
        ("precompute", "otput=x"), ("plan", "+modle=x"), ("check", "+modle=x"), ("check-family", "pretrainde=x"),
        ("bench", "+bnch=x"), ("train", "strategy=cpp"), ("train", "--rin=2"), ("sample", "--ring=2"),
        ("train", "--versoin"), ("sample", "data=x")]:
    sys.argv = ["lightning-cp", name, setting, "hydra.run.dir=runs"]
    try:
        console.main()
    except SystemExit as error:
        assert error.code == 2, (name, setting)
    else:
        raise AssertionError(name)
"""


@pytest.mark.full
def test_every_command_refuses_unknown_settings_without_the_advice_to_add_them(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert ran.returncode == 0, ran.stderr
    meant = (
        "ring",
        "ring",
        "optim",
        "ring",
        "output",
        "model",
        "model",
        "pretrained",
        "bench",
        "cp",
        "ring=2",
        "ring=2?",
    )
    for line, name in zip(ran.stderr.splitlines(), [*meant, "--version", ""], strict=True):
        assert not name or f"did you mean {name}" in line
        assert "To append" not in line


@pytest.mark.parametrize(
    ("experiment", "pipeline", "expected"),
    [
        ("finetune_wan", "FluxPipeline", "is a FluxPipeline: use experiment=finetune_flux$"),
        ("finetune_flux", "WanPipeline", "use experiment=finetune_wan or experiment=finetune_wan22$"),
        ("finetune_flux", "Flux2ModularPipeline", "use experiment=finetune_flux2$"),
        ("finetune_flux2", "Flux2KleinPipeline", None),
        ("finetune_ltx", "LTXImageToVideoPipeline", None),
        ("finetune_wan22", "WanImageToVideoPipeline", None),
        ("finetune_wan", "MyPipeline", None),
        ("mine", "FluxPipeline", None),
    ],
)
def test_an_experiment_for_another_pipeline_is_refused_by_name(
    experiment: str, pipeline: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = f'{{"_class_name": "{pipeline}", "transformer": ["diffusers", "X"]}}'
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer/config.json").write_text("{}")
    (tmp_path / "model_index.json").write_text(index)
    chosen = OmegaConf.create({"hydra": {"runtime": {"choices": {"experiment": experiment}}}})
    monkeypatch.setattr(HydraConfig.instance(), "cfg", chosen)
    config = OmegaConf.create({"model": {"pretrained": str(tmp_path), "component": "transformer"}, "ulysses": 1})
    if expected is None:
        check_transformers(config)
        return
    with pytest.raises(SettingsError, match=expected):
        check_transformers(config)


def test_every_family_has_an_experiment() -> None:
    from lightning_cp.finetune.family_table import FAMILIES, experiments_of

    named = {experiment for family in FAMILIES for experiment in experiments_of(family)}
    assert named == {path.stem for path in (CONF / "experiment").glob("finetune_*.yaml")}
