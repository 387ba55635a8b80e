"""The model card of a fine-tuned model."""

from __future__ import annotations

from pathlib import Path

import yaml

from lightning_cp.finetune.card import ModelCard
from lightning_cp.recipes.training.finetune import shown_settings


def card(**changes: object) -> ModelCard:
    settings: dict[str, object] = {
        "base": "organisation/model: one",
        "family": "wan",
        "command": "python recipes/train.py experiment=finetune_wan",
        "steps": 6,
        "topology": "data 1 × ring 2 × ulysses 1",
        "samples": 5,
        "sizes": {(9, 32, 48): 4, (1, 32, 32): 1},
        **changes,
    }
    return ModelCard(**settings)  # type: ignore[arg-type]


def test_the_card_has_metadata_that_the_hub_reads(tmp_path: Path) -> None:
    path = card(adapter={"rank": 4, "targets": ["to_q", "to_v"], "alpha": None}).write(tmp_path)
    _, metadata, text = path.read_text(encoding="utf-8").split("---\n", 2)
    assert yaml.safe_load(metadata) == {
        "base_model": "organisation/model: one",
        "library_name": "diffusers",
        "tags": ["diffusers", "lightning_cp", "wan", "lora"],
    }
    assert "python recipes/train.py experiment=finetune_wan" in text
    assert "- samples of 9 × 32 × 48: 4" in text
    assert "- lora targets: to_q, to_v" in text
    assert "lora alpha" not in text
    assert "- torch: 2." in text


def test_the_transformer_loads_an_adapter_that_the_pipeline_cannot() -> None:
    adapter = {"rank": 4}
    assert "\npipe.load_lora_weights(folder)\n" in card(adapter=adapter).text()
    said = 'pipe.transformer.load_lora_adapter(folder, prefix="transformer", weight_name='
    assert said in card(adapter=adapter, loads_adapters=False).text()


def test_a_controlnet_is_loaded_as_a_component() -> None:
    text = card(component="controlnet").text()
    assert '\nmodel = AutoModel.from_pretrained(".")' in text
    assert text.count(", controlnet=model)\n") == 1
    assert "AutoModel" not in card().text() + card(adapter={"rank": 4}).text()


def test_the_best_validation_is_marked(tmp_path: Path) -> None:
    text = card(losses={2: 0.5, 4: 0.25, 6: float("nan")}).text()
    assert "| 2 | 0.5 |" in text
    assert "| 4 | 0.25 (best) |" in text
    assert "| 6 |" not in text
    assert "## Validation" not in card().text()


def test_an_older_card_is_replaced(tmp_path: Path) -> None:
    card(steps=1).write(tmp_path)
    card(steps=2).write(tmp_path)
    assert "Trained for 2 steps" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_a_card_shows_settings_of_the_training_only() -> None:
    shown = ["experiment=finetune_wan", "+optim.fused=true", "model.pretrained=owner/name", "lora.targets=[to_q,to_v]"]
    hidden = ["logger=wandb", "logger.api_key=abc123x", "+extra.hf_token=abc123x", "sampling.prompts=[a cat]"]
    assert shown_settings([*hidden, *shown]) == shown


def test_a_card_has_no_absolute_folders() -> None:
    words = [
        "model.pretrained=/home/me/models/base",
        "data.path='~/me/my data'",
        "data.path=[/home/me/a,'/me too/b c']",
    ]
    assert shown_settings(words) == ["model.pretrained=base", "data.path='my data'", "data.path=[a,'b c']"]
