"""Metadata in the headers of a LoRA: kohya's keys, and files that diffusers reads as before."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors import safe_open
from safetensors.torch import load_file

from lightning_cp.export import LORA_FILE, save_lora
from lightning_cp.finetune import LoraSettings, add_lora
from lightning_cp.finetune.adapters.comfyui import COMFYUI_FILE, write_for_comfyui
from lightning_cp.finetune.adapters.lora_file import load_loras, read_lora
from lightning_cp.finetune.adapters.lora_metadata import add_metadata
from lightning_cp.latent_cache import CacheWriter, LatentCache, LatentData, caption_hash, prepare_cache
from lightning_cp.recipes.training.lora_facts import kohya_facts
from tests.e2e.recipe import ROOT
from tests.families.cases import made
from tests.unit.finetune.latent_cache.made import index, media, row

TEXTS = ["", "ohwx, a man, smiling", "ohwx, a man", "ohwx, private name", "ohwx, " + "x" * 200]


@pytest.fixture
def cache(tmp_path: Path) -> LatentCache:
    """Five samples: two of the last caption are in the validation set and for prior preservation."""
    folder = tmp_path / "cache"
    prepare_cache(folder, index())
    writer = CacheWriter(folder)
    for text in TEXTS:
        writer.add_text(text, {"prompt_embeds": torch.zeros(1, 5), "mask": torch.ones(2)})
    for i in range(6):
        changes: dict[str, Any] = {"captions": (caption_hash(TEXTS[1 + i % 4]),), "repeats": 1 + i}
        changes["use"] = {4: "validation", 5: "prior"}.get(i, "train")
        writer.add_media(row(i, **changes), media(i))
    writer.finish()
    return LatentCache(folder)


def test_facts_of_a_run_have_the_names_of_kohya(cache: LatentCache) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        given = ["experiment=finetune_wan", "model.pretrained=/home/me/secret/pipe", "data.path=x", "run_dir=x"]
        config = compose("train", [*given, "objective.weighting=min_snr", "lora.dropout=0.5", "seed=7"])
    facts = kohya_facts(config, cache, samples=len(LatentData(cache)), step=12, adapter={"rank": 16, "alpha": 8.0})
    assert all(type(value) is str for value in facts.values())
    expected = {
        "ss_base_model_version": "qwen_image",
        "ss_sd_model_name": "pipe",
        "ss_network_dim": "16",
        "ss_network_alpha": "8.0",
        "ss_network_dropout": "0.5",
        "ss_num_train_images": str(1 + 2 + 3 + 4),
        "ss_num_reg_images": "6",
        "ss_num_validation_images": "5",
        "ss_steps": "12",
        "ss_seed": "7",
        "ss_optimizer": "torch.optim.AdamW",
        "ss_lr_scheduler": "constant",
        "ss_gradient_checkpointing": "False",
        "ss_resolution": "(64, 64)",
    }
    assert {name: facts[name] for name in expected} == expected
    buckets = json.loads(facts["ss_bucket_info"])["buckets"]
    assert buckets == {"0": {"resolution": [64, 32], "count": 2}, "1": {"resolution": [64, 64], "count": 3}}
    tags = json.loads(facts["ss_tag_frequency"])["data"]
    assert list(tags.items()) == [("ohwx", 5), ("a man", 3)]  # neither long ones, nor those of one sample


def test_diffusers_reads_the_lora_as_before(tmp_path: Path) -> None:
    model = deepcopy(made("wan").transformer)
    add_lora(model, LoraSettings(rank=2, alpha=3.0, targets=["to_q"]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    save_lora(model, tmp_path)
    write_for_comfyui(tmp_path, "WanTransformer3DModel")
    before = {name: load_file(tmp_path / name) for name in (LORA_FILE, COMFYUI_FILE)}
    add_metadata(tmp_path, {"ss_network_dim": "3", "ss_x": "first"})
    add_metadata(tmp_path, {"ss_network_dim": "2"})
    for name, tensors in before.items():
        with safe_open(tmp_path / name, framework="pt") as opened:
            metadata = opened.metadata()
        assert (metadata["format"], metadata["ss_network_dim"], metadata["ss_x"]) == ("pt", "2", "first")
        after = load_file(tmp_path / name)
        assert after.keys() == tensors.keys()
        assert all(torch.equal(after[key], x) for key, x in tensors.items())
    assert (read_lora(tmp_path).rank, read_lora(tmp_path).alpha) == (2, 3.0)
    pipe = deepcopy(made("wan"))
    load_loras(pipe, [tmp_path / LORA_FILE], [1.0])
    (adapter,) = pipe.transformer.peft_config.values()
    assert (adapter.r, adapter.lora_alpha) == (2, 3.0)
