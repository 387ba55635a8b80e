"""Plain diffusers loads the exports of a parallel, sharded run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, WanPipeline
from lightning.pytorch import LightningModule
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from lightning_cp.checkpoint.folder import atomic_folder
from lightning_cp.export import LORA_FILE, save_lora, save_pretrained
from lightning_cp.fabric import ContextParallelFSDPStrategy, ContextParallelStrategy
from lightning_cp.training import WeightAverage
from tests.dist.lightning_ranks import fabric_of
from tests.harness import RankPool
from tests.models import TINY

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS: dict[str, Any] = {"cp": ContextParallelStrategy, "cp_fsdp": ContextParallelFSDPStrategy}
PIPELINES = {"wan": WanPipeline, "flux": FluxPipeline}


def _arguments(name: str) -> dict[str, Any]:
    return {k: x.float() if x.is_floating_point() else x for k, x in TINY[name].arguments().items()}


def _trained(fabric: Any, name: str, model: torch.nn.Module) -> tuple[Any, Tensor]:
    """One step. Returns: the wrapped model and its output after it."""
    arguments = _arguments(name)
    wanted = [p for p in model.parameters() if p.requires_grad]
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(wanted, lr=0.1))
    fabric.backward(wrapped(**arguments, return_dict=False)[0].square().mean())
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        return wrapped, wrapped(**arguments, return_dict=False)[0]


def _whole(rank: int, world: int, folder: Path, kind: str, name: str) -> tuple[Tensor, Tensor, bool]:
    fabric = fabric_of(rank, world, KINDS[kind](ring=world))
    model = TINY[name].build().float()
    average = WeightAverage(model, 0.5) if kind == "cp" else None
    wrapped, out = _trained(fabric, name, model)
    save_pretrained(wrapped, folder / "model")
    there = (folder / "model" / "config.json").is_file()  # on every rank, at once
    averaged = out
    if average is not None:
        average.update(model, step=1)
        with average.swapped_in(model):
            save_pretrained(model, folder / "average", dtype=torch.bfloat16, max_shard_size="20KB")
    else:
        save_pretrained(model, folder / "average", dtype=torch.bfloat16, max_shard_size="20KB")
    return out, averaged, there


@pytest.mark.parametrize(("kind", "name"), [("cp", "wan"), ("cp_fsdp", "flux")])
@pytest.mark.default(1)
def test_a_whole_model_is_what_from_pretrained_loads(run_ranks: RankPool, tmp_path: Path, kind: str, name: str) -> None:
    results = run_ranks(3, _whole, tmp_path, kind, name, init=False)
    assert all(there for *_, there in results)
    model = type(TINY[name].build()).from_pretrained(tmp_path / "model")
    arguments = _arguments(name)
    out = model(**arguments, return_dict=False)[0]
    untrained = TINY[name].build().float()(**arguments, return_dict=False)[0]
    assert (out - results[0][0]).abs().max() < 1e-4
    assert (out - untrained).norm() > 1e-2 * out.norm()
    half = type(model).from_pretrained(tmp_path / "average")
    files = [load_file(path) for path in (tmp_path / "average").glob("*.safetensors")]
    assert len(files) > 1
    assert {x.dtype for file in files for x in file.values()} == {torch.bfloat16}
    if kind == "cp":
        expected = 2 / 11 * TINY[name].build().float().proj_out.weight + 9 / 11 * model.proj_out.weight
        assert torch.allclose(half.proj_out.weight.float(), expected, rtol=1e-2, atol=1e-3)


def _adapter(rank: int, world: int, folder: Path, kind: str, name: str) -> tuple[Tensor, str, str]:
    from peft import LoraConfig

    fabric = fabric_of(rank, world, KINDS[kind](ring=world))
    model: Any = TINY[name].build().float()
    model.requires_grad_(False)
    torch.manual_seed(5)
    model.add_adapter(LoraConfig(r=2, lora_alpha=8, target_modules=["to_q", "to_v"], init_lora_weights=False), "mine")
    wrapped, out = _trained(fabric, name, model)
    with CommDebugMode() as communication:
        save_lora(wrapped, folder / "lora", adapter="mine")
    sharded = [x for key, x in model.named_parameters() if ".lora_" in key and isinstance(x, DTensor)]
    gathered = sum(count for op, count in communication.get_comm_counts().items() if "gather" in str(op))
    assert gathered == len(sharded), "nothing of the base is gathered"
    assert bool(sharded) == (kind == "cp_fsdp")
    with pytest.raises(ValueError, match="adapters") as whole:
        save_pretrained(model, folder / "whole")
    with pytest.raises(ValueError, match="adapter='other'") as other:
        save_lora(model, folder / "lora", adapter="other")
    return out, str(whole.value), str(other.value)


@pytest.mark.parametrize(("kind", "name"), [("cp", "flux"), ("cp_fsdp", "wan")])
@pytest.mark.default(1)
def test_an_adapter_is_what_load_lora_weights_loads(run_ranks: RankPool, tmp_path: Path, kind: str, name: str) -> None:
    results = run_ranks(3, _adapter, tmp_path, kind, name, init=False)
    out, whole, other = results[1]
    assert "(mine)" in whole
    assert "has the adapters: mine" in other
    model: Any = TINY[name].build().float()
    arguments = _arguments(name)
    before = model(**arguments, return_dict=False)[0]
    parts = {"vae": None, "text_encoder": None, "tokenizer": None, "transformer": model}
    if name == "flux":
        parts |= {"text_encoder_2": None, "tokenizer_2": None}
    pipeline = PIPELINES[name](scheduler=FlowMatchEulerDiscreteScheduler(), **parts)
    pipeline.load_lora_weights(tmp_path / "lora")
    loaded = model(**arguments, return_dict=False)[0]
    assert (loaded - out).abs().max() < 1e-4
    assert (before - out).norm() > 1e-2 * out.norm()
    assert [path.name for path in (tmp_path / "lora").iterdir()] == [LORA_FILE]


def _refused(rank: int, world: int, folder: Path) -> str:
    fabric_of(rank, world, ContextParallelStrategy(ring=world))
    with pytest.raises(TypeError, match="LightningModule is not a diffusers model"):
        save_pretrained(LightningModule(), folder / "x")
    (folder / "file").touch()
    with pytest.raises(RuntimeError) as caught:
        save_pretrained(TINY["wan"].build(), folder / "file" / "model")
    return str(caught.value)


def test_a_failed_write_raises_on_every_rank(run_ranks: RankPool, tmp_path: Path) -> None:
    for said in run_ranks(2, _refused, tmp_path, init=False):
        assert "NotADirectoryError" in said


def test_an_export_that_fails_leaves_the_older_one_and_none_touches_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for names in ("ab", "a"):
        with atomic_folder(folder, replaces="w_*") as scratch:
            for name in names:
                (scratch / f"w_{name}").write_text(names)
        (folder / "README").write_text("mine")
    with suppress(OSError), atomic_folder(folder) as scratch:
        (scratch / "w_a").write_text("half")
        raise OSError("disk full")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"w_a": "a", "README": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
