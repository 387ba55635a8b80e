"""The code of docs/sampling.md, and README's of pipelines, runs as it stands and gives one process's samples."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.docs.test_readme import README
from tests.e2e.recipe import ROOT
from tests.harness import warm
from tests.pipelines import table

PAGE = (ROOT / "docs" / "sampling.md").read_text()
FIRST, MANY, LOOP_BLOCK, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PIPE = """
import numpy as np, torch
from diffusers import DiffusionPipeline

torch.manual_seed(5)  # loading draws numbers, too
made = DiffusionPipeline.from_pretrained("my-pipeline")
arguments = dict(prompt="a cat", negative_prompt="a dog", height=48, width=80, num_inference_steps=2)
expected = made(**arguments).frames[0]
"""
CALLED = f"""{PIPE}
import os

torch.manual_seed(5 + int(os.environ["RANK"]))
{FIRST}
assert np.abs(video - expected).max() < 1e-4
print("exact")
dist.destroy_process_group()
"""
CALLED_OFTEN = f"""{PIPE}
bird = dict(prompt="a bird", height=32, width=48, num_inference_steps=3)
torch.manual_seed(5)
made(**arguments)
expected = made(**bird).frames[0]
import os
import torch.distributed as dist
from lightning_cp import ContextParallelConfig, parallelize_pipeline

dist.init_process_group("gloo")
pipe = made
torch.manual_seed(5 + int(os.environ["RANK"]))
{MANY}
assert (video is None) == (dist.get_rank() > 0)
assert video is None or np.abs(video - expected).max() < 1e-4
print("exact")
dist.destroy_process_group()
"""
SNIPPET = next(text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "parallelize_pipeline" in text)
IN_README = f"""{PIPE}
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(5)
pipe = DiffusionPipeline.from_pretrained("my-pipeline")
{SNIPPET}
assert np.abs(pipe(**arguments).frames[0] - expected).max() < 1e-4
print("exact")
dist.destroy_process_group()
"""
LOOP = f"""
import torch
from tests.models.wan import wan

transformer = wan().build().float().eval()
text, no_text = torch.randn(1, 5, transformer.config.text_dim), torch.randn(1, 5, transformer.config.text_dim)
noise = torch.randn(1, transformer.config.in_channels, 3, 6, 10)

def alone(steps=4, scale=3.0):
    x = noise
    for step in range(steps):
        time = torch.full((1,), 1000 * (1 - step / steps))
        with torch.no_grad():
            on, off = (transformer(x, time, words, return_dict=False)[0] for words in (text, no_text))
        x = x - (off + scale * (on - off)) / steps
    return x

expected = alone()
{LOOP_BLOCK}
assert (sample(noise, text, no_text) - expected).abs().max() < 1e-4 * expected.abs().max()
print("exact")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as diffusers writes it."""
    folder = tmp_path_factory.mktemp("pipeline") / "wan"
    torch.manual_seed(0)
    table("wan")["wan"].make().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        pytest.param(CALLED, 4, marks=pytest.mark.full),
        (IN_README, 2),
        pytest.param(CALLED_OFTEN, 4, marks=pytest.mark.full),
        pytest.param(LOOP, 4, marks=pytest.mark.full),
    ],
    ids=["sampling.md", "README", "many calls", "own loop"],
)
def test_code_of_the_docs_gives_one_processs_samples(script: str, ranks: int, pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "my-pipeline").symlink_to(pipeline)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = warm.run_ranks(ranks, [sys.executable, "script.py"], env=environment, cwd=tmp_path, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("exact") == ranks
