"""Sampling from a run of an untrusted author: its files cannot run code."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from lightning_cp.recipes.digits.denoisers import CONDITIONING_FILE, WanDenoiser, save_conditioning
from lightning_cp.recipes.sampling.trained import load_denoiser
from lightning_cp.recipes.settings.trained import TrainedDenoiser
from tests.e2e.recipe import ROOT, started

SIZE = {"in_channels": 1, "out_channels": 1, "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1}


class Attack:
    """Creates a file when it is unpickled."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.ran),)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The files of a run that sampling reads."""
    folder = tmp_path / "run"
    transformer = WanTransformer3DModel(**SIZE, patch_size=(1, 1, 1), ffn_dim=48, freq_dim=32, text_dim=16)
    transformer.save_pretrained(folder / "transformer")
    save_conditioning(WanDenoiser(transformer, num_classes=10, num_tokens=3), folder, writes=True)
    TrainedDenoiser("WanDenoiser", 10, 3, None, (1, 1, 8, 8), True, 4, 2, 1.0).write(folder)
    return folder


def test_the_weights_are_those_of_the_run(run: Path) -> None:
    module: Any = load_denoiser(run)
    expected = WanTransformer3DModel.from_pretrained(run / "transformer").state_dict()
    for name, x in module.transformer.state_dict().items():
        assert torch.equal(x, expected[name])
    assert module.class_tokens.table.weight.shape == (11, 3 * 16)


def a_pickle_for_the_classes(run: Path, ran: Path) -> None:
    (run / CONDITIONING_FILE).write_bytes(pickle.dumps(Attack(ran)))


def a_pickle_for_the_transformer(run: Path, ran: Path) -> None:
    (file,) = (run / "transformer").glob("*.safetensors")
    file.unlink()
    torch.save({"x": Attack(ran)}, file.with_suffix(".bin"))


def a_class_with_code(run: Path, ran: Path) -> None:
    (run / "evil.py").write_text(f"import os\nos.mkdir({str(ran)!r})\nclass Model: pass\n")
    config = run / "transformer/config.json"
    changed = {"_class_name": ["evil", "Model"], "auto_map": {"AutoModel": "evil.Model"}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **changed}))


def a_description_with_code(run: Path, ran: Path) -> None:
    values = json.loads((run / "denoiser.json").read_text())
    attack = {"_target_": "os.mkdir", "_args_": [str(ran)]}
    (run / "denoiser.json").write_text(json.dumps({**values, "patch_size": attack}))


@pytest.mark.parametrize(
    ("attack", "told"),
    [
        (a_pickle_for_the_classes, "cannot be used: Error while deserializing header"),
        (a_pickle_for_the_transformer, "safetensors"),
        (a_class_with_code, "but WanDenoiser needs another class"),
        (a_description_with_code, "patch_size={'_target_': 'os.mkdir', "),
    ],
)
def test_a_file_that_would_run_code_is_one_error(run: Path, tmp_path: Path, attack: Any, told: str) -> None:
    attack(run, tmp_path / "ran")
    with pytest.raises(ValueError, match=told):
        load_denoiser(run)
    assert not (tmp_path / "ran").exists()


def test_the_recipe_refuses_it_in_one_line(run: Path, tmp_path: Path) -> None:
    a_description_with_code(run, tmp_path / "ran")
    script = ROOT / "recipes" / "sample.py"
    with started(f"source={run}", "progress=false", folder=tmp_path / "ours", script=script) as process:
        _, stderr = process.communicate(timeout=150)
    assert process.returncode == 2, stderr
    (line,) = stderr.splitlines()
    assert line.startswith(f"error: source={run}: {run}/denoiser.json: patch_size=")
    assert not (tmp_path / "ran").exists()
