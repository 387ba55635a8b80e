"""README's scripts run unchanged, and the snippets of the pages in a script with the lines that a reader would add."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.recipe import ROOT
from tests.harness import warm

README = (ROOT / "README.md").read_text()
SAMPLING = (ROOT / "docs/sampling.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d")

MODEL = """
import torch
from tests.models.wan import wan

transformer, arguments = wan().build(), wan().arguments()
transformer(**arguments, return_dict=False)[0].square().mean().backward()
expected = [p.grad.clone() for p in transformer.parameters()]
transformer.zero_grad()
"""
CHECK = """
for parameter, gradient in zip(transformer.parameters(), expected, strict=True):
    assert (parameter.grad - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-7, parameter.shape
"""
FABRIC = f"""{MODEL}
optimizer = torch.optim.SGD(transformer.parameters(), lr=0.1)
{{snippet}}
fabric.backward(model(**arguments, return_dict=False)[0].square().mean())
{CHECK}
fabric.print("exact")
"""
SCRIPT, PIPELINE = BLOCK.findall(README)
LOSS = "\ntrainer.print(f\"last loss {trainer.callback_metrics['loss']:.4f}\")\n"
DIFFUSERS = f"""{MODEL}
import types
import torch.distributed as dist

dist.init_process_group("gloo")
pipe = types.SimpleNamespace(transformer=transformer)
{{snippet}}
pipe.transformer(**arguments, return_dict=False)[0].square().mean().backward()
for parameter in transformer.parameters():
    dist.all_reduce(parameter.grad)
    parameter.grad /= 2
{CHECK}
if dist.get_rank() == 0:
    print("exact")
dist.destroy_process_group()
"""


def ran(
    script: str, folder: Path, *launcher: str, cwd: Path | None = None, cold: bool = True, ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if ranks > 1:
        environment |= {"TORCHELASTIC_RUN_ID": "warm", "GROUP_RANK": "0"}  # as torchrun does
        return warm.run_ranks(ranks, [sys.executable, path], env=environment, cwd=folder, timeout=120)
    if not cold:
        return warm.run([sys.executable, path], env=environment, cwd=cwd, timeout=120)
    return subprocess.run(
        [sys.executable, *launcher, str(path)], env=environment, cwd=cwd, capture_output=True, text=True, timeout=240
    )


def snippet_of(page: str, part: str) -> str:
    return next(text for text in BLOCK.findall((ROOT / "docs" / page).read_text()) if part in text)


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len(README.splitlines()) <= 120
    assert max(len(SCRIPT.splitlines()), len(PIPELINE.splitlines())) <= 30


def last_loss(script: str, folder: Path, *, ranks: int = 1) -> str:
    result = ran(script + LOSS, folder, cwd=folder, ranks=ranks)
    assert result.returncode == 0, result.stderr
    return re.findall(r"last loss (\S+)", result.stdout)[0]


@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.default(1)
def test_the_trainer_script_runs_as_it_stands(ranks: int, tmp_path: Path) -> None:
    """One process starts the second rank itself; with two, it has the variables of torchrun."""
    assert 0 < float(last_loss(SCRIPT, tmp_path, ranks=ranks)) < 10


@pytest.mark.full
def test_the_trainer_script_gives_the_loss_of_one_process(tmp_path: Path) -> None:
    alone = SCRIPT.partition("  # one device")[0].replace("devices=2", "devices=1").replace("ring=2", "ring=1")
    assert alone.count("devices=1") == alone.count("ring=1") == 1
    alone += SCRIPT[SCRIPT.index("\ntrainer.fit") :]
    assert last_loss(SCRIPT, tmp_path) == last_loss(alone, tmp_path)


@pytest.mark.full
def test_the_fabric_snippet_trains_exactly(tmp_path: Path) -> None:
    snippet = snippet_of("training.md", "fabric = Fabric(")
    result = ran(FABRIC.format(snippet=snippet), tmp_path, cold=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("exact") == 1


@pytest.mark.parametrize("torchrun", [False, True])
@pytest.mark.default(1)
def test_the_diffusers_snippet_runs_on_two_ranks(torchrun: bool, tmp_path: Path) -> None:
    snippet = snippet_of("sampling.md", "apply_context_parallel(pipe")
    script = DIFFUSERS.format(snippet=snippet)
    result = ran(script, tmp_path, *TORCHRUN) if torchrun else ran(script, tmp_path, cold=False, ranks=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("exact") == 1


def test_the_table_is_what_its_command_prints() -> None:
    result = warm.run([sys.executable, str(ROOT / "recipes" / "compare.py")], timeout=240)
    assert result.returncode == 0, result.stderr
    printed = [line.split(" | ") for line in result.stdout.splitlines() if line.startswith("| ")]
    shown = {line.split(" | ")[0]: line.split(" | ") for line in SAMPLING.splitlines() if line.startswith("| ")}
    assert len(printed) > 10
    for name, theirs, ours in printed:
        assert name in shown
        assert shown[name][1] == theirs or max(float(theirs), float(shown[name][1])) < 1e-9
        assert shown[name][2] == ours or max(float(ours.rstrip(" |")), float(shown[name][2].rstrip(" |"))) < 1e-12
