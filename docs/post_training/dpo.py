"""Train the main job's model with Diffusion-DPO to prefer samples that a classifier recognises.

    python recipes/train.py max_steps=200 hydra.run.dir=digits
    python docs/post_training/dpo.py run=digits devices=2 ring=2

Settings are those of `SETTINGS`. Prints and writes (`output`) the preference accuracy of held-out pairs and the reward.
"""

import csv
from itertools import pairwise
from pathlib import Path

import torch
from lightning.fabric import Fabric
from omegaconf import OmegaConf

from lightning_cp import fabric as strategies
from lightning_cp.data import RandomStream
from lightning_cp.finetune import LoraSettings, add_lora
from lightning_cp.objectives import dpo_loss, reference_policy
from lightning_cp.recipes.digits.data import NUM_CLASSES, Digits
from lightning_cp.recipes.digits.recognise import recognise_digits
from lightning_cp.recipes.sampling.trained import load_denoiser
from lightning_cp.training import sample_noise, sample_times

SETTINGS = {
    "run": "digits",  # folder of the run of recipes/train.py
    "output": "preference.csv",
    "strategy": "ContextParallelStrategy",  # or ContextParallelFSDPStrategy, which shards the weights
    "devices": 1,
    "ring": 1,
    "precision": "32-true",
    "seed": 0,
    "candidates": 100,  # of each class, sampled twice; pairs of a correct and a wrong digit are kept
    "held_out": 64,  # pairs
    "steps": 8,  # denoising steps
    "updates": 100,
    "batch": 32,  # pairs
    "beta": 50.0,  # the smaller, the further the model may move from the reference
    "lr": 1e-3,
}


@torch.no_grad()
def sample(model, labels, *, seed, steps, device):
    """Sample digits: pixels, and whether each is correct."""
    x = sample_noise((len(labels), *Digits.sample_shape), seed=seed, step=0, device=device)
    for sigma, following in pairwise(torch.linspace(1, 0, steps + 1).tolist()):
        x = x + model(x, torch.full((len(x),), sigma, device=device), labels).float() * (following - sigma)
    return x, recognise_digits(x, labels).predicted == labels.cpu()


def make_pairs(model, settings):
    """Sample each label twice. Returns: preferred and rejected pixels and labels, of labels with one correct sample."""
    labels = torch.arange(NUM_CLASSES * settings.candidates) % NUM_CLASSES
    key = {"steps": settings.steps, "device": "cpu"}
    (first, is_correct), (second, other) = (sample(model, labels, seed=settings.seed + i, **key) for i in range(2))
    chosen = is_correct != other
    first, second, keep = first[chosen], second[chosen], is_correct[chosen].view(-1, 1, 1, 1, 1)
    return torch.where(keep, first, second), torch.where(keep, second, first), labels[chosen]


def pair_errors(model, pairs, *, seed, step, first_index):
    """Return the mean squared error of each preferred, then of each rejected sample, [2b], at equal noise and time."""
    preferred, rejected, labels = pairs
    key = {"seed": seed, "step": step, "first_index": first_index, "device": labels.device}
    noise = sample_noise(preferred.shape, stream=RandomStream.ROLLOUT, **key).to(preferred).repeat(2, 1, 1, 1, 1)
    sigma = sample_times(len(preferred), **key).to(preferred).repeat(2)
    clean, level = torch.cat([preferred, rejected]), sigma.view(-1, 1, 1, 1, 1)
    velocity = model((1 - level) * clean + level * noise, sigma, labels.repeat(2))
    return (velocity - (noise - clean)).square().flatten(1).mean(dim=1)


def pair_losses(model, pairs, *, beta, **key):
    """Return the loss of each pair, [b]; below log(2), the model prefers the preferred sample."""
    with torch.no_grad(), reference_policy(model):
        reference = pair_errors(model, pairs, **key)
    return dpo_loss(pair_errors(model, pairs, **key), reference, beta=beta)


def main():
    settings = OmegaConf.merge(SETTINGS, OmegaConf.from_cli())
    run, rows = Path(settings.run), []
    model = load_denoiser(run)
    pairs = make_pairs(model, settings)  # the same on every rank
    add_lora(model.transformer, LoraSettings(rank=16, targets=["to_q", "to_k", "to_v", "net.0.proj", "net.2"]))
    strategy = getattr(strategies, settings.strategy)(ring=settings.ring)
    fabric = Fabric(devices=settings.devices, precision=settings.precision, strategy=strategy)
    fabric.launch()
    trained = [x for x in model.parameters() if x.requires_grad]
    model, optimizer = fabric.setup(model, torch.optim.AdamW(trained, lr=settings.lr, eps=1e-6))
    pairs = [x.to(fabric.device) for x in pairs]
    held_out, train = ([x[part] for x in pairs] for part in (slice(settings.held_out), slice(settings.held_out, None)))
    labels = torch.arange(200, device=fabric.device) % NUM_CLASSES
    rank, share = strategy.data_rank, settings.batch // strategy.data_size
    for update in range(settings.updates + 1):
        if update % 50 == 0 or update == settings.updates:
            with torch.no_grad():
                held = pair_losses(model, held_out, beta=settings.beta, seed=settings.seed + 1, step=0, first_index=0)
            accuracy = float((held < torch.log(torch.tensor(2.0))).float().mean())
            correct = sample(model, labels, seed=settings.seed + 9, steps=settings.steps, device=fabric.device)[1]
            rows.append((update, accuracy, float(held.mean()), float(correct.float().mean())))
            fabric.print("update {}: accuracy {:.3f}, loss {:.4f}, reward {:.3f}".format(*rows[-1]), flush=True)
        if update == settings.updates:
            break
        indices = [(update * settings.batch + rank * share + i) % len(train[0]) for i in range(share)]
        key = {"seed": settings.seed, "step": update, "first_index": indices}
        fabric.backward(pair_losses(model, [x[indices] for x in train], beta=settings.beta, **key).mean())
        optimizer.step()
        optimizer.zero_grad()
    if fabric.is_global_zero:
        with open(settings.output, "w", newline="") as file:
            csv.writer(file).writerows([("update", "accuracy", "loss", "reward"), *rows])


if __name__ == "__main__":
    main()
