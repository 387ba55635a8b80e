"""The memory that a certificate needs: of frozen experts, one at a time is on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_cp.app.settings import certify
from lightning_cp.app.settings.table import SettingsError

EXPERTS = {"transformer": 3 << 29, "transformer_2": 1 << 29}  # weights


@pytest.mark.parametrize(
    ("component", "lora", "accelerator", "needed_gib"),
    [
        ("transformer", {}, "cuda", 3),
        ([*EXPERTS], {}, "cuda", 3),
        ([*EXPERTS], {}, "cpu", 4),
        ([*EXPERTS], None, "cuda", 36),  # 2 bytes, and 16 of gradients, moments and EMA
    ],
)
def test_memory_of_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, component: Any, lora: Any, accelerator: str, needed_gib: int
) -> None:
    for name, size in EXPERTS.items():
        header = json.dumps({"weight": {"dtype": "BF16", "shape": [size], "data_offsets": [0, 2 * size]}})
        (tmp_path / name).mkdir()
        file = tmp_path / name / "diffusion_pytorch_model.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    config = OmegaConf.create(
        {"model": {"pretrained": str(tmp_path), "component": component, "dtype": "bfloat16"}, "lora": lora}
    )
    monkeypatch.setattr(certify, "free_memory_bytes", lambda _: needed_gib << 30)
    certify._check_memory(config, accelerator)
    monkeypatch.setattr(certify, "free_memory_bytes", lambda _: (needed_gib << 30) - 1)
    with pytest.raises(SettingsError, match=f"needs at least {needed_gib}.0 GiB for"):
        certify._check_memory(config, accelerator)
