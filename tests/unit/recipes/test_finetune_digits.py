"""The example of docs/finetune_digits with a small model, in one process: family, data, and a LoRA that learns."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import sklearn.svm  # noqa: F401  (sets environment variables, which a test must not)
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file

from lightning_cp.export import save_lora
from lightning_cp.finetune import LoraSettings, add_lora
from lightning_cp.finetune.families import InputOptions, family_for, load_family, registry
from lightning_cp.objectives import objective_for
from lightning_cp.recipes.digits.data import Digits, are_digits, load_scans
from lightning_cp.recipes.digits.denoisers import CONDITIONING_FILE, WanDenoiser, save_conditioning
from tests.e2e.recipe import ROOT

SIZE = {"in_channels": 1, "out_channels": 1, "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names of the script."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    return runpy.run_path(str(ROOT / "docs/finetune_digits/digits_lora.py"), run_name="digits_lora")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Folder with the export of a small denoiser, as recipes/train.py writes it."""
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(**SIZE, patch_size=(1, 1, 1), ffn_dim=48, freq_dim=32, text_dim=16)
    denoiser = WanDenoiser(transformer, num_classes=10, num_tokens=3)
    transformer.save_pretrained(tmp_path / "run" / "transformer")
    save_conditioning(denoiser, tmp_path / "run", writes=True)
    return tmp_path / "run"


def test_the_family_is_found_and_gives_the_denoisers_output(example: dict[str, Any], run: Path) -> None:
    base = example["DigitModel"].load(run)
    family = family_for(base)
    assert load_family("digits", family.facts).text == family.text
    denoiser = WanDenoiser(base.transformer, num_classes=10, num_tokens=3)
    with torch.no_grad():
        denoiser.class_tokens.table.weight.copy_(base.class_tokens.flatten(1))
    data = example["Handful"](base, family, count=4)
    batch = data.collate([data[i, 0] for i in range(4)])
    scans = load_scans()
    assert torch.equal(batch["latents"][:, 0, 0], -scans.pixels[-4:])
    times = torch.tensor([0.1, 0.4, 0.6, 0.9])
    arguments = family.inputs(batch["latents"], times, batch, InputOptions())
    with torch.no_grad():
        expected = denoiser(batch["latents"], times, scans.labels[-4:])
        torch.testing.assert_close(base.transformer(**arguments)[0], expected)
    dropped = batch.without_text(torch.tensor([True, False, False, False]), family.text)
    assert torch.equal(dropped["prompt_embeds"][0], base.class_tokens[10])


@pytest.mark.full
def test_the_lora_learns_the_other_look(example: dict[str, Any], run: Path, tmp_path: Path) -> None:
    base = example["DigitModel"].load(run)
    family = family_for(base)
    names = add_lora(base.transformer, LoraSettings(rank=4), family=family)
    assert {name.rpartition(".")[2] for name in names} >= {"to_q", "proj", "proj_out"}
    module = example["DigitLora"](base.transformer, family, objective=objective_for(family, seed=0))
    data = example["Handful"](base, family, count=8)
    batch = data.collate([data[i, 0] for i in range(8)])
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(20):  # always the same noise
        loss = module.objective.loss(base.transformer, family, batch, step=0, first_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    save_lora(base.transformer, tmp_path / "lora")
    plain = WanTransformer3DModel.from_pretrained(run / "transformer")
    plain.load_lora_adapter(tmp_path / "lora", weight_name="pytorch_lora_weights.safetensors")
    arguments = family.inputs(batch["latents"], torch.full([8], 0.5), batch, InputOptions())
    with torch.no_grad():
        torch.testing.assert_close(plain(**arguments)[0], base.transformer(**arguments)[0])


def test_scans_are_held_out() -> None:
    whole, rest = Digits(), Digits(held_out=32)
    assert (len(whole), len(rest)) == (1797, 1765)
    assert all(torch.equal(whole[i][0], rest[i][0]) for i in (0, 1764))
    data = {"channels": 1, "num_classes": 10, "num_samples": 1765}
    assert are_digits({**data, "held_out": 32})
    assert not are_digits(data)
    with pytest.raises(ValueError, match="held_out=1797 must be at least 0 and less than 1797"):
        Digits(held_out=1797)


def test_the_file_of_the_embeddings(run: Path) -> None:
    assert {name: tuple(x.shape) for name, x in load_file(run / CONDITIONING_FILE).items()} == {
        "class_tokens.table.weight": (11, 48)
    }
