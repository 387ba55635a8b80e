"""A reader's own training script, without context parallelism. Prints the losses."""

import diffusers
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything


class Reader(LightningModule):
    """A FLUX transformer on random tokens."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.transformer = diffusers.FluxTransformer2DModel(
            in_channels=8,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=width // 2,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=12,
            axes_dims_rope=(4, 4, 4),
        )

    def training_step(self, batch: tuple[torch.Tensor, ...], _: int) -> torch.Tensor:
        tokens, text, pooled, times = batch
        grid = torch.cartesian_prod(torch.arange(1.0), torch.arange(5.0), torch.arange(5.0)).to(self.device)
        out = self.transformer(
            tokens, text, pooled, times, img_ids=grid, txt_ids=torch.zeros(7, 3, device=self.device), return_dict=False
        )[0]
        loss = (out - tokens).square().mean()
        self.print(f"loss {loss.item():.6f}")
        return loss

    def train_dataloader(self) -> torch.utils.data.DataLoader[tuple[torch.Tensor, ...]]:
        g = torch.Generator().manual_seed(1)
        shapes = ((8, 25, 8), (8, 7, 16), (8, 12), (8,))
        data = torch.utils.data.TensorDataset(*(torch.rand(shape, generator=g) for shape in shapes))
        return torch.utils.data.DataLoader(data, batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    seed_everything(0)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=2, use_distributed_sampler=False)
    trainer.fit(Reader())
