"""LightningModules around a transformer of diffusers and a plain one, and data: without code for parallelism."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.dist.plain import Plain
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


class Mixed(LightningModule):
    """A frozen encoder, a parallel transformer, a tied weight, and a buffer that no state dict holds."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Linear(16, 16).requires_grad_(requires_grad=False)
        self.plain = Plain()
        self.head, self.tail = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.tail.weight = self.head.weight
        self.register_buffer("scale", torch.rand(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(self.head(self.plain(self.encoder(x))[0])) * self.scale
        return out

    def training_step(self, x: Tensor, _: int) -> Tensor:
        return self(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def inputs() -> Tensor:
    """A batch of two samples for `Mixed` or `Plain`."""
    return torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(2))


def same_batches(count: int = 2) -> DataLoader[Tensor]:
    """A loader that yields `inputs()` `count` times."""
    return DataLoader([x for _ in range(count) for x in inputs()], batch_size=2)  # type: ignore[arg-type]
