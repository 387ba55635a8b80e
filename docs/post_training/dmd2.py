"""Distil the main job's model to a few steps with DMD2.

    python recipes/train.py max_steps=1000 hydra.run.dir=digits
    python docs/post_training/dmd2.py run=digits devices=2 ring=2

Settings are those of `SETTINGS`. Prints how samples of the teacher and of the generator differ from real digits.
"""

import copy
from itertools import pairwise
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from lightning_cp import pytorch as strategies
from lightning_cp.data import RandomStream
from lightning_cp.recipes.digits.data import NUM_CLASSES, Digits, load_scans
from lightning_cp.recipes.digits.recognise import recognise_digits
from lightning_cp.recipes.sampling.trained import load_denoiser
from lightning_cp.training import sample_noise

SETTINGS = {
    "run": "digits",  # folder of the run of recipes/train.py
    "strategy": "ContextParallelStrategy",  # or ContextParallelFSDPStrategy
    "devices": 1,
    "ring": 1,
    "seed": 0,
    "updates": 160,
    "every": 4,  # the generator is trained in every 4th step, the fake score in the others
    "batch": 40,
    "steps": 2,  # denoising steps of the generator
    "lr": 3e-4,
}


class Distillation(LightningModule):
    """A generator that samples in few steps, a fake score that learns its samples, and a frozen teacher."""

    def __init__(self, teacher, settings):
        super().__init__()
        self.automatic_optimization = False
        self.teacher = teacher.eval().requires_grad_(False)
        self.generator, self.fake = (copy.deepcopy(teacher).requires_grad_(True) for _ in range(2))
        self.settings, self.shape, self.losses = settings, Digits.sample_shape, []

    def configure_optimizers(self):
        return [torch.optim.AdamW(x.parameters(), self.settings.lr, eps=1e-6) for x in (self.generator, self.fake)]

    def clean(self, model, x, sigma, labels):
        return x - sigma.view(-1, 1, 1, 1, 1) * model(x, sigma, labels)

    def noise(self, samples, step, *shape):
        """Draw noise that depends on the seed, the global index of a sample and a step, but not on the ranks."""
        key = {"seed": self.settings.seed, "step": step, "stream": RandomStream.ROLLOUT, "device": self.device}
        return sample_noise((len(samples), *shape), first_index=samples.tolist(), dtype=self.dtype, **key)

    def sample(self, model, samples, labels, *, steps, end):
        """Sample: each step predicts clean data and adds new noise. Gradients: of step number `end`, the last one."""
        x, sigmas = self.noise(samples, 0, *self.shape), torch.linspace(1, 0, steps + 1).tolist()
        for step, (sigma, following) in enumerate(pairwise(sigmas[: end + 1]), 1):
            with torch.set_grad_enabled(torch.is_grad_enabled() and step == end):
                clean = self.clean(model, x, x.new_full((len(x),), sigma), labels)
            x = (1 - following) * clean + following * self.noise(samples, step, *self.shape)
        return clean

    def noised(self, clean, samples, step):
        """Add noise. Returns: noisy data, noise, and sigma, between 0.02 and 0.98."""
        sigma = 0.02 + 0.96 * torch.special.ndtr(self.noise(samples, step))
        noise, level = self.noise(samples, step + 1, *self.shape), sigma.view(-1, 1, 1, 1, 1)
        return (1 - level) * clean + level * noise, noise, sigma

    def training_step(self, batch, index):
        samples, labels = batch
        (turn, rest), few = divmod(index, self.settings.every), self.settings.steps
        self.generator.requires_grad_(rest == 0)
        self.fake.requires_grad_(rest != 0)
        clean = self.sample(self.generator, *batch, steps=few, end=1 + turn % few)  # equal steps on all ranks
        x, noise, sigma = self.noised(clean.detach(), samples, 100)
        if rest == 0:
            with torch.no_grad():  # the direction from the generator's distribution to the teacher's
                real, fake = (self.clean(model, x, sigma, labels) for model in (self.teacher, self.fake))
                target = clean - (fake - real) / (clean - real).abs().mean(dim=(1, 2, 3, 4), keepdim=True)
            loss = (clean - target).square().mean() / 2
        else:
            loss = (self.fake(x, sigma, labels) - (noise - clean)).square().mean()
        self.manual_backward(loss)
        self.optimizers()[rest != 0].step()
        self.zero_grad()
        self.losses.append(loss.detach())

    @torch.no_grad()
    def on_train_end(self):
        """Print how samples differ from real digits: in mean and deviation of each pixel, and to a classifier."""
        real, few, indices = load_scans().pixels.flatten(1), self.settings.steps, torch.arange(400)
        for name, steps in (("teacher", 32), ("teacher", few), ("generator", few)):
            labels = indices.to(self.device) % NUM_CLASSES
            x = self.sample(getattr(self, name), indices + 10**6, labels, steps=steps, end=steps)
            ours, correct = x.float().cpu().flatten(1), recognise_digits(x, labels).fraction
            distance = (ours.mean(0) - real.mean(0)).square().sum() + (ours.std(0) - real.std(0)).square().sum()
            self.print(f"{name}, {steps} steps: distance {distance:.2f}, recognised {correct:.3f}")


def main():
    settings = OmegaConf.merge(SETTINGS, OmegaConf.from_cli())
    run = Path(settings.run)
    teacher = load_denoiser(run)
    strategy = getattr(strategies, settings.strategy)(ring=settings.ring)
    common = {"logger": False, "enable_checkpointing": False, "max_epochs": 1}
    trainer = Trainer(devices=settings.devices, strategy=strategy, **common)
    data = [(i, i % NUM_CLASSES) for i in range(settings.updates * settings.batch)]
    trainer.fit(Distillation(teacher, settings), DataLoader(data, settings.batch * settings.ring // settings.devices))


if __name__ == "__main__":
    main()
