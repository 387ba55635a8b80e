"""Pipelines that are loaded only to encode: facts without the transformer's weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cp.errors import FamilyError
from lightning_cp.families import family_for
from lightning_cp.finetune.encoders import ConfigOnly, components_on, load_encoders, release
from lightning_cp.finetune.precompute.usable import buckets_of
from tests.families.cases import CASES, made

pytestmark = pytest.mark.filterwarnings("ignore")


def saved(folder: Path, case: str = "flux") -> Path:
    made(case).save_pretrained(str(folder))
    return folder


def edit_index(folder: Path, **changes: Any) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("case", list(CASES)[::8])
@pytest.mark.default(2)
def test_facts_are_those_of_the_pipeline_and_no_transformer_weights_are_read(case: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "pipe", case)
    expected, family = made(case), family_for(made(case))
    for name in family.components.train:
        for file in (folder / name).glob("*.safetensors"):
            file.unlink()
    pipe = load_encoders(str(folder), torch.float32)
    assert family_for(pipe).facts == family.facts
    assert {type(getattr(pipe, name, None)) for name in family.components.train} <= {ConfigOnly, type(None)}
    for file in (*folder.rglob("*.safetensors"), *folder.rglob("*.bin")):
        file.unlink(missing_ok=True)
    shell = load_encoders(str(folder), torch.float32, weights=False)
    kinds = {"sizes": None, "frames": None}
    assert family_for(shell).grid == family.grid
    for loaded in (pipe, shell):
        assert buckets_of(loaded, family, **kinds) == buckets_of(expected, family, **kinds)


def test_dtypes_of_text_encoders_and_vae(tmp_path: Path) -> None:
    pipe = load_encoders(str(saved(tmp_path / "pipe")), torch.bfloat16, vae_dtype=torch.float32)
    assert (pipe.text_encoder.dtype, pipe.text_encoder_2.dtype, pipe.vae.dtype) == (torch.bfloat16,) * 2 + (
        torch.float32,
    )


def test_the_dtype_of_the_vae_is_that_of_all_vaes(tmp_path: Path) -> None:
    pipe = load_encoders(str(saved(tmp_path / "pipe", "ltx2")), torch.bfloat16, vae_dtype=torch.float32)
    assert (pipe.vae.dtype, pipe.audio_vae.dtype, pipe.text_encoder.dtype) == (*(torch.float32,) * 2, torch.bfloat16)


def test_a_missing_vae_or_text_encoder_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "pipe", "wan")
    edit_index(folder, vae=[None, None])
    with pytest.raises(FamilyError, match="has no vae, which encode"):
        load_encoders(str(folder), torch.float32)
    edit_index(folder, vae=["diffusers", "AutoencoderKLWan"], text_encoder=[None, None])
    with pytest.raises(FamilyError, match="has no text_encoder"):
        load_encoders(str(folder), torch.float32)


def test_a_folder_without_a_component_is_an_error_of_one_line(tmp_path: Path) -> None:
    folder = saved(tmp_path / "pipe", "wan")
    shutil.rmtree(folder / "vae")
    with pytest.raises(ValueError, match=r"model\.pretrained=.* cannot be loaded: the folder vae is missing") as raised:
        load_encoders(str(folder), torch.float32)
    assert "\n" not in str(raised.value)


def test_without_a_transformer(tmp_path: Path) -> None:
    folder = saved(tmp_path / "pipe", "wan")
    edit_index(folder, transformer=[None, None], transformer_2=[None, None])
    with pytest.raises(FamilyError, match="has no transformer: it must have one of transformer"):
        load_encoders(str(folder), torch.float32)


def test_a_pipeline_without_a_family(tmp_path: Path) -> None:
    folder = saved(tmp_path / "pipe", "wan")
    edit_index(folder, _class_name="LTXLatentUpsamplePipeline")
    with pytest.raises(FamilyError, match=r"registered for LTXLatentUpsamplePipeline, only for .*WanPipeline"):
        load_encoders(str(folder), torch.float32)
    edit_index(folder, _class_name="NoSuchPipeline")
    with pytest.raises(ValueError, match="has no NoSuchPipeline"):
        load_encoders(str(folder), torch.float32)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_a_folder_that_is_no_pipeline(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "some.txt").touch()
    if content is not None:
        (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model\.pretrained=") as raised:
        load_encoders(str(tmp_path), torch.float32)
    assert "\n" not in str(raised.value)


def test_a_modular_pipeline_without_its_encoders(tmp_path: Path) -> None:
    (tmp_path / "modular_model_index.json").write_text('{"_class_name": "MiniMaxH3ModularPipeline"}')
    with pytest.raises(FamilyError, match="has no text_encoder and no tokenizer and no processor and no vae and no au"):
        load_encoders(str(tmp_path), torch.float32)


def test_a_modular_pipeline_without_a_family(tmp_path: Path) -> None:
    (tmp_path / "modular_model_index.json").write_text('{"_class_name": "AnimaModularPipeline"}')
    with pytest.raises(FamilyError, match="no family is registered for AnimaModularPipeline"):
        load_encoders(str(tmp_path), torch.float32)


def test_code_of_a_modular_pipeline_is_not_run(tmp_path: Path) -> None:
    folder = saved(tmp_path / "pipe", "minimax_h3")
    path = folder / "modular_model_index.json"
    index = json.loads(path.read_text())
    (folder / "tokenizer" / "mine.py").write_text("raise SystemExit('code of a stranger')")
    index["tokenizer"][0] = index["tokenizer"][2]["type_hint"][0] = "mine"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="contains Python code"):
        load_encoders(str(folder), torch.float32)


@pytest.mark.parametrize("component", ["vae", "transformer"])
def test_remote_code_is_not_run(tmp_path: Path, component: str) -> None:
    folder = saved(tmp_path / "pipe", "wan")
    (folder / component / "mine.py").write_text("raise SystemExit('code of a stranger')")
    edit_index(folder, **{component: ["mine", "Mine"]})
    with pytest.raises(ValueError, match="mine"):
        load_encoders(str(folder), torch.float32)


def test_a_custom_pipeline_class_is_not_run(tmp_path: Path) -> None:
    folder = saved(tmp_path / "pipe", "wan")
    (folder / "mine.py").write_text("raise SystemExit('code of a stranger')")
    edit_index(folder, _class_name=["mine", "MyPipeline"])
    with pytest.raises(ValueError, match="Python code"):
        load_encoders(str(folder), torch.float32)


def test_components_are_on_the_device_in_turn(tmp_path: Path) -> None:
    pipe = load_encoders(str(saved(tmp_path / "pipe")), torch.float32)
    meta = torch.device("meta")
    vae, text = pipe.vae, pipe.text_encoder
    with components_on(pipe, ["text_encoder"], torch.device("cpu")):
        assert (pipe.vae, pipe.text_encoder_2) == (None, None)
        assert pipe.text_encoder is text
    assert (pipe.vae, pipe.text_encoder) == (vae, text)
    with pytest.raises(NotImplementedError), components_on(pipe, ["vae"], meta):  # no data to bring back
        assert pipe.vae.device == meta
    release(pipe, ["text_encoder"])
    assert pipe.text_encoder is None


def test_quantised_encoders_that_cannot_be_loaded_are_one_line(tmp_path: Path) -> None:
    folder = saved(tmp_path / "pipe")

    def error(component: str, quantiser: Any) -> str:
        path = folder / component / "config.json"
        before = path.read_text()
        path.write_text(json.dumps({**json.loads(before), "quantization_config": quantiser}))
        with pytest.raises(ValueError, match="has a quantization_config") as caught:
            load_encoders(str(folder), torch.float32)
        path.write_text(before)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith(
            f"model.pretrained={folder}: {component} has a quantization_config, and cannot be loaded: "
        )
        return str(caught.value)

    # transformers would load these weights as if they were not quantised
    assert "transformers does not know the quantiser unknown. Install" in error(
        "text_encoder_2", {"quant_method": "unknown"}
    )
    assert "Unknown quantization type, got unknown" in error("vae", {"quant_method": "unknown"})
    assert "has no attribute" in error("text_encoder", 7)
    assert error("vae", {}).endswith("Install what the quantiser needs, or use weights that are not quantised")
    load_encoders(str(folder), torch.float32)
