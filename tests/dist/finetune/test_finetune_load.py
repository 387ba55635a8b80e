"""Weights that each rank streams from the files are those that `from_pretrained` loads."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_cp import fabric, pytorch
from lightning_cp.finetune.adapters.lora import add_lora
from lightning_cp.finetune.load import load_transformer, meta_transformer
from lightning_cp.finetune.settings import LoraSettings
from lightning_cp.finetune.weight_files import stream_weights
from tests.dist.lightning_ranks import fabric_of, trainer_of, whole
from tests.harness import RankPool
from tests.harness.memory import MemoryPeak
from tests.models.wan import WAN
from tests.pretrained import inputs, saved

pytestmark = pytest.mark.filterwarnings("ignore")
STRATEGIES: dict[tuple[str, str], Any] = {
    ("fabric", "cp"): fabric.ContextParallelStrategy,
    ("fabric", "cp_fsdp"): fabric.ContextParallelFSDPStrategy,
    ("trainer", "cp"): pytorch.ContextParallelStrategy,
    ("trainer", "cp_fsdp"): pytorch.ContextParallelFSDPStrategy,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """All weights and buffers, by their names in a model without adapters."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name.replace(".base_layer.", "."): x.detach() for name, x in named if ".lora_" not in name}


def differences(model: nn.Module, expected: nn.Module) -> list[str]:
    """Names of weights and buffers that are not equal bit for bit, or only in one of the models."""
    found, wanted = tensors(model), tensors(expected)
    unequal = [
        name
        for name in found.keys() & wanted.keys()
        if found[name].dtype != wanted[name].dtype or not torch.equal(whole(found[name]), wanted[name])
    ]
    return sorted([*(found.keys() ^ wanted.keys()), *unequal])


class Module(LightningModule):
    """Trains a transformer; remembers its differences from `expected` at the first step."""

    def __init__(self, transformer: nn.Module, expected: nn.Module, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.transformer, self.arguments = transformer, arguments
        self.expected = [expected]  # in a list: no child
        self.found: list[str] | None = None

    def training_step(self, _: Tensor, __: int) -> Tensor:
        self.found = differences(self.transformer, self.expected[0])
        return self.transformer(**self.arguments, return_dict=False)[0].float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([x for x in self.parameters() if x.requires_grad], lr=0.1)


def _streamed(
    rank: int, world: int, folder: Path, name: str, dtype: str, flavour: str, kind: str, adapted: bool
) -> tuple[list[str], int, list[str]]:
    """Differences, how many weights are whole, and warnings about initialisation."""
    model = meta_transformer(folder, dtype=DTYPES[dtype])
    expected = load_transformer(folder, dtype=DTYPES[dtype])
    assert all(x.is_meta for x in model.parameters())
    if adapted:
        add_lora(model, LoraSettings(rank=2))
    strategy = STRATEGIES[flavour, kind](ring=world)
    with warnings.catch_warnings(record=True) as caught:
        if flavour == "fabric":
            ours = fabric_of(rank, world, strategy)
            warnings.simplefilter("always")
            ours.setup(model)
            found = differences(model, expected)
        else:
            module = Module(model, expected, inputs(name, DTYPES[dtype]))
            trainer = trainer_of(rank, world, strategy, max_steps=1)
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader([torch.zeros(1)]))
            assert module.found is not None
            found = module.found
    whole_ones = sum(not isinstance(x, DTensor) for x in model.parameters())
    return found, whole_ones, [str(x.message) for x in caught if "initializ" in str(x.message)]


@pytest.mark.parametrize(
    ("name", "dtype", "flavour", "kind", "adapted"),
    [
        ("wan", "bfloat16", "fabric", "cp_fsdp", True),
        ("wan", "bfloat16", "trainer", "cp_fsdp", True),
        ("flux", "float32", "trainer", "cp", False),
        ("sd3", "float32", "fabric", "cp_fsdp", True),
    ],
)
@pytest.mark.default(1)
def test_streamed_weights_and_buffers_equal_loaded_ones(
    run_ranks: RankPool, tmp_path: Path, name: str, dtype: str, flavour: str, kind: str, adapted: bool
) -> None:
    saved(tmp_path, name)
    assert len(list((tmp_path / "transformer").glob("*.safetensors"))) > 1
    results = run_ranks(3, _streamed, tmp_path, name, dtype, flavour, kind, adapted, init=False)
    for found, whole_ones, uninitialized in results:
        assert found == []
        assert uninitialized == []
        assert (whole_ones == 0) == (kind == "cp_fsdp")


def _streamed_again(rank: int, world: int, folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Differences after set-up; after a change and a second set-up, which must not load again; after streaming."""
    ours = fabric_of(rank, world, fabric.ContextParallelFSDPStrategy(ring=world, replicate=2))
    model = meta_transformer(folder, dtype=torch.float32)
    expected = load_transformer(folder, dtype=torch.float32)
    ours.setup(model)
    first = differences(model, expected)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    fabric_of(rank, world, fabric.ContextParallelFSDPStrategy(ring=world, replicate=2)).setup(model)
    changed = differences(model, expected)
    stream_weights(model, folder)
    return first, changed, differences(model, expected)


@pytest.mark.full
def test_weights_are_loaded_once_and_on_replicas_too(run_ranks: RankPool, tmp_path: Path) -> None:
    saved(tmp_path, "wan")
    for first, changed, again in run_ranks(4, _streamed_again, tmp_path, init=False):
        assert first == []
        assert changed == ["scale_shift_table"]
        assert again == []


def _peaks(rank: int, world: int, folder: Path, stream: bool) -> tuple[float, float, float]:
    """Peaks of host memory while loading, above what was held before, in bytes.

    Returns: bytes of anonymous memory (the process's own), of all resident memory (with mapped pages of the files), and
    what is held at the end.
    """
    ours = fabric_of(rank, world, fabric.ContextParallelFSDPStrategy(ring=world))
    load = meta_transformer if stream else load_transformer
    with MemoryPeak() as peak:
        model = load(folder, dtype=torch.float32)
        ours.setup(model)
    assert all(isinstance(x, DTensor) for x in model.parameters())
    held = sum(x.to_local().numel() * x.element_size() for x in model.parameters())
    return peak.anonymous, peak.resident, held


@pytest.mark.full
def test_no_rank_holds_the_whole_model_while_streaming(tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    config = {**WAN, "num_attention_heads": 8, "attention_head_dim": 128, "ffn_dim": 4096, "num_layers": 6}
    model = WanTransformer3DModel(**config)
    size = sum(x.numel() * x.element_size() for x in model.parameters())
    assert 350e6 < size < 450e6
    model.save_pretrained(tmp_path / "transformer", max_shard_size="60MB")
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    del model
    for stream in (True, False):
        pool = RankPool()  # new processes: used ones keep memory that they have freed
        try:
            peaks = pool(3, _peaks, tmp_path, stream, init=False, timeout_s=300)
        finally:
            pool.close()
        for rank, (anonymous, resident, held) in enumerate(peaks):
            how = "streamed" if stream else "loaded whole"
            print(
                f"3 ranks, model {size / 1e6:.0f} MB, {how}, rank {rank}: peak {anonymous / 1e6:.0f} MB, with "
                f"mapped files {resident / 1e6:.0f} MB; holds {held / 1e6:.0f} MB"
            )
            if stream:
                assert anonymous < size / 3 + 60e6
                assert resident < size / 3 + 120e6
            else:
                assert resident > size
