"""Loading a transformer from a pipeline's folder: what is loaded, and what is refused before anything is read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_cp.engine.meta import deferred_loads, load_when_allocated, materialize
from lightning_cp.errors import PlanError
from lightning_cp.finetune.load import load_transformer, meta_transformer
from lightning_cp.finetune.weight_files import INDEX_FILE, SINGLE_FILE, stream_weights
from tests.pretrained import saved

LOADS: list[Callable[..., nn.Module]] = [load_transformer, meta_transformer]
both = pytest.mark.parametrize("load", LOADS)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("wan"), "wan", components=("transformer", "transformer_2"))


@pytest.fixture
def copy(wan: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(wan, tmp_path / "wan"))


def error(load: Callable[..., Any], source: Any, component: str = "transformer") -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load(source, component, dtype=torch.float32)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_transformer_is_loaded_for_training(wan: Path) -> None:
    model = load_transformer(wan, "transformer_2", dtype=torch.bfloat16)
    assert type(model).__name__ == "WanTransformer3DModel"
    assert model.training
    assert all(x.requires_grad for x in model.parameters())
    assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    assert model.scale_shift_table.dtype == torch.float32  # as from_pretrained does


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["wan", "flux", "sd3"])
def test_a_streamed_model_is_the_loaded_one(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    saved(tmp_path, name)
    model, expected = meta_transformer(tmp_path, dtype=dtype), load_transformer(tmp_path, dtype=dtype)
    assert all(x.is_meta for x in model.parameters())
    assert model.training
    assert model.config["_name_or_path"] == expected.config["_name_or_path"]
    state = torch.random.get_rng_state()
    materialize(model, torch.device("cpu"), sent=deferred_loads(model).names)
    deferred_loads(model).run()
    stream_weights(model, tmp_path)
    assert torch.equal(state, torch.random.get_rng_state())
    found = dict((*model.named_parameters(), *model.named_buffers()))
    wanted = dict((*expected.named_parameters(), *expected.named_buffers()))
    assert found.keys() == wanted.keys()
    for key, x in wanted.items():
        assert found[key].dtype == x.dtype, key
        assert torch.equal(found[key], x), key


def test_tied_weights_are_read_under_one_name(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight

    (tmp_path / "model").mkdir()
    (tmp_path / "model_index.json").write_text("{}")
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model" / "diffusion_pytorch_model.safetensors")
    model = Tied()
    stream_weights(model, tmp_path, "model")
    assert torch.equal(model.b.weight, torch.ones(2, 2))


def test_a_loader_is_run_for_weights_without_storage_only() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    for layer in model:
        load_when_allocated(layer, lambda module: nn.init.ones_(module.weight))
    found = deferred_loads(model, excluded={"1.bias"})
    assert found.names == {"1.weight"}
    assert [module for module, _ in found.loads] == [model[1]]
    assert not deferred_loads(model, excluded={"1.bias", "1.weight"}).loads


@both
@pytest.mark.parametrize("dtype", [torch.int64, "bfloat16", None, torch.float8_e4m3fn])
def test_a_dtype_that_cannot_be_trained_is_refused(load: Callable[..., nn.Module], wan: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype=.* must be torch.float32"):
        load(wan, dtype=dtype)


@both
def test_a_source_that_is_no_pipeline_is_refused(load: Callable[..., nn.Module], wan: Path, tmp_path: Path) -> None:
    assert "must be a pipeline's folder, or the id of one on the Hub" in error(load, tmp_path / "absent")
    assert "must be a pipeline's folder, or the id of one on the Hub" in error(load, "name-without-owner")
    assert "it has no model_index.json: use a folder saved by save_pretrained" in error(load, tmp_path)
    assert "it holds one model, so use its parent folder" in error(load, wan / "transformer")
    (tmp_path / "modular_model_index.json").write_text('{"_class_name": "MiniMaxH3ModularPipeline"}')
    assert "has no transformer 'transformer', only no models at all" in error(load, tmp_path)


@both
def test_an_id_that_cannot_be_downloaded_is_one_line(
    load: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: str, **_: Any) -> str:
        raise OSError(f"cannot reach the Hub for {source}\nmore lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    assert "model.pretrained=owner/name is not a folder, and cannot be downloaded: cannot reach" in error(
        load, "owner/name"
    )


@both
def test_an_id_on_the_hub_is_downloaded_without_other_components(
    load: Callable[..., nn.Module], wan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def download(source: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(wan)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    load("owner/name", "transformer_2", dtype=torch.float32)
    indexes = {"model_index.json", "modular_model_index.json"}
    assert {name.split("/")[0] for name in asked} == {*indexes, "transformer_2"}


@both
def test_components_that_cannot_be_trained_are_refused(load: Callable[..., nn.Module], copy: Path) -> None:
    assert "no transformer 'transformer_3', only transformer, transformer_2" in error(load, copy, "transformer_3")
    index = json.loads((copy / "model_index.json").read_text())
    index |= {
        "vae": ["diffusers", "AutoencoderKLWan"],
        "text_encoder": ["transformers", "T5EncoderModel"],
        "coded": ["my_module", "MyTransformer"],
        "newer": ["diffusers", "NextYearsTransformer"],
    }
    (copy / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(PlanError, match=r"vae cannot be trained: no plan is registered for .*AutoencoderKLWan"):
        load(copy, "vae", dtype=torch.float32)
    assert "transformers.T5EncoderModel, which is not a transformer" in error(load, copy, "text_encoder")
    assert "coded is a MyTransformer from Python code in the pipeline (my_module)" in error(load, copy, "coded")
    assert "newer is diffusers.NextYearsTransformer, which is not" in error(load, copy, "newer")
    (copy / "transformer" / "model.py").write_text("raise SystemExit")
    assert "from Python code in the pipeline (model.py), which is not run" in error(load, copy)


@both
def test_weight_files_that_are_missing_or_damaged_are_named(load: Callable[..., nn.Module], copy: Path) -> None:
    folder = copy / "transformer"
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    assert f"{shard} is damaged or incomplete" in error(load, copy)
    shard.unlink()
    assert f"{shard} is missing, but {INDEX_FILE} lists it" in error(load, copy)
    shard.write_bytes(sorted(folder.glob("*.safetensors"))[0].read_bytes())
    assert f"{shard} has no tensor" in error(load, copy)
    (folder / INDEX_FILE).write_text('{"weight_map": [1]}')
    assert "it has no valid weight_map" in error(load, copy)
    (folder / INDEX_FILE).write_text("{")
    assert f"{folder / INDEX_FILE} cannot be read" in error(load, copy)


@both
def test_pickle_files_are_refused(load: Callable[..., nn.Module], copy: Path) -> None:
    folder = copy / "transformer"
    for path in (*folder.glob("*.safetensors"), folder / INDEX_FILE):
        path.unlink()
    assert "has neither" in error(load, copy)
    os.mkfifo(folder / SINGLE_FILE)
    assert error(load, copy).endswith(f"{folder / SINGLE_FILE} is a named pipe, but must be a file")
    torch.save({}, folder / "diffusion_pytorch_model.bin")
    assert "in pickle files only (diffusion_pytorch_model.bin)" in error(load, copy)


@both
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("proj_out.bias"), "proj_out.bias and 0 more weights are missing"),
        (lambda state: state.update(more=torch.ones(1)), "the files have more and 0 more weights that the model lacks"),
        (lambda state: state.update({"proj_out.bias": torch.ones(3)}), "proj_out.bias has shape [3] in the files"),
    ],
    ids=["missing", "more", "shape"],
)
def test_weights_of_another_model_are_refused(
    load: Callable[..., nn.Module], copy: Path, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    folder = copy / "transformer"
    state = {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}
    for path in (*folder.glob("*.safetensors"), folder / INDEX_FILE):
        path.unlink()
    change(state)
    save_file(state, folder / "diffusion_pytorch_model.safetensors")
    assert said in error(load, copy)


def test_quantised_weights_cannot_be_streamed(copy: Path) -> None:
    path = copy / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "quanto"}}))
    assert "quantised weights, which cannot be sharded: use strategy=cp" in error(meta_transformer, copy)
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "unknown"}}))
    assert "transformer has a quantization_config, and cannot be loaded: " in error(load_transformer, copy)


def test_streaming_into_another_model_is_refused(wan: Path) -> None:
    with pytest.raises(ValueError, match=r"weight and 1 more weights are missing in the files"):
        stream_weights(nn.Linear(2, 2), wan)
    model = load_transformer(wan, dtype=torch.float32)
    model.proj_out = nn.Linear(48, 3)
    with pytest.raises(ValueError, match=r"proj_out.weight has shape \[16, 48\] in the files, and \[3, 48\]"):
        stream_weights(model, wan)
    del model.proj_out
    with pytest.raises(ValueError, match=r"and 1 more weights that the model lacks"):
        stream_weights(model, wan)
