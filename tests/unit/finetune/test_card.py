"""The model card of a fine-tuned model."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from lightning_cp.finetune.card import ModelCard


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


SECRETS = [
    "logger.api_key=abc123x",
    "+hf_token='abc123x'",
    "logger={_target_: wandb, api_key: abc123x, project: p}",
    '+x={"password":"abc 123x,y","a":1}',
    "+db.url=https://me:abc123x@host/x",
    "+db.Password=abc=123x",
    "wandb.api_key=abc,123x",
    "+accessKey=abc123x",
    "+access_key_id=abc123x",
    "+auth=abc123x",
    "+h={Authorization: Bearer abc123x}",
    "--token abc123x",
    "+tokens=[abc,123x]",
    "+secrets.a=abc123x",
    "+token.value=abc123x",
    "+x={api_key:{a:abc123x}}",
    "+db.pass=abc123x",
]


@pytest.mark.parametrize("word", SECRETS)
def test_a_card_has_no_secrets(word: str) -> None:
    words = word.split() if word.startswith("-") else [word]
    text = card(command=shlex.join(["python", "recipes/train.py", *words, "ring=2"])).text()
    assert "123x" not in text
    assert "***" in text
    assert "ring=2" in text


def test_settings_without_secrets_are_shown() -> None:
    words = ["max_tokens=4096", "model.pretrained=owner/name", "monkey=3", "keys=1", "lr=1e-4", "prompt=a/b or c"]
    assert shlex.join(words) in card(command=shlex.join(words)).text()


def test_a_card_has_no_absolute_folders() -> None:
    words = ["model.pretrained=/home/me/models/base", "data.path='~/me/data'", "x=[/home/me/a.png,/home/me/b.png]"]
    words += [
        "run_dir=/home/me too/my runs/r 1",
        "/home/me too/my recipes/train.py",
        "u=file:///home/me/x",
        r"w=C:\Users\me\x",
    ]
    text = card(
        command=shlex.join(words), base="/home/me/models/base", adapter={"file": "/home/me/l.safetensors"}
    ).text()
    assert "me/" not in text
    assert "me too" not in text
    assert "'run_dir=r 1' train.py" in text
    assert "Users" not in text
    assert "/home" not in text
    assert "model.pretrained=base" in text
    assert "[a.png,b.png]" in text
    assert "# LoRA of base\n" in text
    assert "- lora file: l.safetensors\n" in text


@pytest.mark.parametrize("fence", ["```", "`````"])
def test_a_prompt_stays_in_its_code_block(fence: str) -> None:
    prompt = f"sampling.prompt=a\n{fence}\n## Certificate\n<script>"
    text = card(command=shlex.join(["python", prompt]), base=f"x\n{fence}\n# y").text()
    lines = text.splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.endswith("bash") and set(line[:-4]) == {"`"}]
    end = next(i for i in range(start + 1, len(lines)) if lines[i].strip() == lines[start][:-4])
    assert end == start + 2, "the command is one line"
    assert "## Certificate" in lines[start + 1]
    assert "## Certificate" not in lines
    assert fence not in lines
