"""Train the main job's model with Flow-GRPO until a classifier recognises its digits.

    python recipes/train.py max_steps=200 hydra.run.dir=digits
    python docs/post_training/flow_grpo.py run=digits devices=2 ring=2

Settings are those of `SETTINGS`. Prints and writes (`output`) the mean reward of each iteration.
"""

import csv
from itertools import pairwise
from pathlib import Path

import torch
from lightning.fabric import Fabric
from omegaconf import OmegaConf

from lightning_cp.data import RandomStream
from lightning_cp.fabric import ContextParallelStrategy
from lightning_cp.finetune import LoraSettings, add_lora
from lightning_cp.objectives import gaussian_kl, group_advantages, policy_loss, reference_policy, sde_step
from lightning_cp.recipes.digits.data import NUM_CLASSES, Digits
from lightning_cp.recipes.digits.recognise import recognise_digits
from lightning_cp.recipes.sampling.trained import load_denoiser
from lightning_cp.training import sample_noise

SETTINGS = {
    "run": "digits",  # folder of the run of recipes/train.py
    "output": "rewards.csv",
    "devices": 1,
    "ring": 1,
    "precision": "32-true",
    "seed": 0,
    "iterations": 16,
    "group": 12,  # samples of each class in a rollout
    "steps": 8,  # denoising steps
    "random_steps": 3,  # the first of them are random, and trained; the others follow the flow
    "updates": 2,  # optimizer steps for each rollout; from the second on, ratios differ from 1
    "eta": 0.7,
    "clip": 1e-3,
    "kl": 1e-3,  # weight of the divergence from the model before training
    "lr": 2e-3,
}


def rollout(model, labels, samples, iteration, settings):
    """Sample digits. Returns: pixels, and for each random step (x, sigma, sigma_next, next, log-probability)."""
    sigmas, taken = torch.linspace(1, 0, settings.steps + 1).tolist(), []

    def noise(step):
        key = {"seed": settings.seed, "step": iteration * (settings.steps + 1) + step, "stream": RandomStream.ROLLOUT}
        return sample_noise((len(labels), *Digits.sample_shape), first_index=samples, device=labels.device, **key)

    x = noise(settings.steps)
    for step, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
        velocity = model(x, torch.full((len(x),), sigma, device=x.device), labels)
        if step < settings.random_steps:
            done = sde_step(x, velocity, sigma, sigma_next, noise=noise(step), eta=settings.eta)
            taken.append((x, sigma, sigma_next, done.next, done.log_prob))
            x = done.next
        else:
            x = x + velocity.float() * (sigma_next - sigma)
    return x, taken


def main():
    settings = OmegaConf.merge(SETTINGS, OmegaConf.from_cli())
    run = Path(settings.run)
    model = load_denoiser(run)
    add_lora(
        model.transformer, LoraSettings(rank=16, targets=["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"])
    )
    fabric = Fabric(
        devices=settings.devices, precision=settings.precision, strategy=ContextParallelStrategy(ring=settings.ring)
    )
    fabric.launch()
    trained = [x for x in model.parameters() if x.requires_grad]
    model, optimizer = fabric.setup(model, torch.optim.AdamW(trained, lr=settings.lr, eps=1e-6))
    rank, size = fabric.strategy.data_rank, fabric.strategy.data_size
    count = NUM_CLASSES * settings.group // size
    samples = list(range(rank * count, (rank + 1) * count))  # of this data group; a class is in all data groups
    labels = torch.tensor([sample % NUM_CLASSES for sample in samples], device=fabric.device)
    rows = []
    for iteration in range(settings.iterations):
        with torch.no_grad():
            pixels, taken = rollout(model, labels, samples, iteration, settings)
        rewards = (recognise_digits(pixels, labels).predicted == labels.cpu()).float().to(fabric.device)
        advantages = group_advantages(rewards, labels.tolist(), std="all")
        largest = 0.0
        for update in range(settings.updates):
            for index, (x, sigma, sigma_next, following, old_log_prob) in enumerate(taken):
                times = torch.full((len(x),), sigma, device=x.device)
                levels = {"sigma": sigma, "sigma_next": sigma_next, "next": following, "eta": settings.eta}
                with torch.no_grad(), reference_policy(model):
                    reference = sde_step(x, model(x, times, labels), **levels)
                with fabric.no_backward_sync(model, enabled=index < len(taken) - 1):
                    step = sde_step(x, model(x, times, labels), **levels)
                    loss = policy_loss(step.log_prob, old_log_prob, advantages, clip=settings.clip)
                    loss = loss + settings.kl * gaussian_kl(step, reference)
                    fabric.backward(loss.mean() / len(taken))
                if update == 0:  # the model has not changed since the rollout: exactly 0
                    largest = max(largest, float((step.log_prob - old_log_prob).abs().max()))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        reward = float(fabric.all_reduce(rewards.mean(), reduce_op="mean"))
        rows.append((iteration, reward, largest))
        fabric.print(f"iteration {iteration}: reward {reward:.4f}, log-probabilities differ by {largest:g}", flush=True)
    if fabric.is_global_zero:
        with open(settings.output, "w", newline="") as file:
            csv.writer(file).writerows([("iteration", "reward", "difference"), *rows])


if __name__ == "__main__":
    main()
