"""A LightningModule around a diffusers transformer, and its data. Neither has code for context parallelism."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import Dataset

from tests.models.wan import wan


class Clips(Dataset[dict[str, Tensor]]):
    """Random clips with text, by index."""

    def __init__(self, count: int) -> None:
        g = torch.Generator().manual_seed(4)
        self.clips, self.text = torch.randn(count, 4, 3, 6, 10, generator=g), torch.randn(count, 7, 16, generator=g)

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index), "clip": self.clips[index], "text": self.text[index]}


class TrainsWan(LightningModule):
    """Mean squared error against zero. `seen`: indices of each step's batch on this rank."""

    def __init__(self, *, lr: float = 0.1) -> None:
        super().__init__()
        self.transformer = wan().build().float()
        self.lr = lr
        self.seen: list[list[int]] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        times = 100 + batch["index"]
        out = self.transformer(batch["clip"], times, batch["text"], return_dict=False)[0]
        return out.square().mean()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        self.seen.append(batch["index"].tolist())
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch["index"]))

    def test_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=len(batch["index"]))

    def predict_step(self, batch: dict[str, Tensor], _: int) -> tuple[list[int], Tensor]:
        times = 100 + batch["index"]
        out = self.transformer(batch["clip"], times, batch["text"], return_dict=False)[0]
        return batch["index"].tolist(), out

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)
