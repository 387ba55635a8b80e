"""Cells of a notebook, run in an IPython shell. Prints what the last cell leaves in `report`, as JSON."""

import json
import sys

from IPython.core.interactiveshell import InteractiveShell

CELLS = [
    """
import warnings; warnings.simplefilter("ignore")
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader
from lightning_cp import fabric, pytorch
from tests.dist.lightning_ranks import QUIET, flat
from tests.dist.module import Clips, TrainsWan

report = {}
torch.randn(1500, 1500) @ torch.randn(1500, 1500)  # starts the threads of this process
kinds = {"cp": "ContextParallelStrategy", "cp_fsdp": "ContextParallelFSDPStrategy"}
""",
    """
def train(count, kind, **settings):
    torch.manual_seed(0)
    module = TrainsWan()
    strategy = getattr(pytorch, kinds[kind])(ring=count, **settings)
    trainer = Trainer(accelerator="cpu", devices=count, strategy=strategy, max_steps=2, **QUIET)
    trainer.fit(module, DataLoader(Clips(4), batch_size=2))
    return flat(module), trainer
""",
    """
for kind in kinds:
    report[f"one rank {kind}"] = str(type(train(1, kind)[1].strategy.launcher))
alone, _ = train(1, "cp")
""",
    """
for kind in kinds:
    found, trainer = train(2, kind)
    report[f"trainer {kind}"] = float((found - alone).norm() / alone.norm())
    report[f"logged {kind}"] = float(trainer.callback_metrics["train_loss"])
""",
    """
def step(ours):
    torch.manual_seed(0)
    transformer = TrainsWan().transformer
    model, optimizer = ours.setup(transformer, torch.optim.SGD(transformer.parameters(), lr=0.1))
    clips = Clips(2)
    loss = model(clips.clips, torch.tensor([100, 101]), clips.text, return_dict=False)[0].square().mean()
    ours.backward(loss)
    optimizer.step()
    return loss.item(), ours.world_size, [ours.strategy.context_size, ours.strategy.data_size]

report["fabric"] = {
    f"{kind} {count}": Fabric(accelerator="cpu", devices=count, strategy=getattr(fabric, kinds[kind])(ring=count))
    .launch(step)
    for kind in kinds
    for count in (1, 2)
}
""",
    """
try:
    train(2, "cp_fsdp", start_method="popen")
except ValueError as error:
    report["popen"] = str(error)
torch.cuda.is_initialized = lambda: True
try:
    train(2, "cp")
except RuntimeError as error:
    report["cuda"] = str(error)
""",
]

if __name__ == "__main__":
    shell = InteractiveShell.instance()
    for cell in CELLS:
        shell.run_cell(cell).raise_error()
    print("REPORT", json.dumps(shell.user_ns["report"]))
    sys.stdout.flush()
