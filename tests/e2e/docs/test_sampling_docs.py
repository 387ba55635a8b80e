"""The code about pipelines runs as it stands, and gives one process's samples."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.docs.test_readme import BLOCK, PIPELINE, snippet_of
from tests.e2e.recipe import ROOT
from tests.harness import warm
from tests.pipelines import PIPES

PAGE = (ROOT / "docs" / "sampling.md").read_text()
FIRST, MANY, PROMPTS, STAGES, LOOP_BLOCK, *_ = BLOCK.findall(PAGE.replace("tiny-flux", "my-pipeline"))
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


def tiny(script: str, model: str, call: str) -> str:
    """Return a page's script for a tiny pipeline: other weights, dtype and arguments of the call."""
    script = script.replace(model, "my-pipeline").replace("dtype=torch.bfloat16", "dtype=torch.float32")
    return re.sub(r"num_inference_steps=28|height=480, width=832, num_frames=81", call, script)


FLUX = "height=48, width=32, num_inference_steps=2"
IN_README = f"""
import numpy as np, torch
from diffusers import DiffusionPipeline
from PIL import Image

made = DiffusionPipeline.from_pretrained("my-pipeline")
torch.manual_seed(5)
expected = np.asarray(made("a red fox", {FLUX}).images[0]).astype(int)
{tiny(PIPELINE, "black-forest-labs/FLUX.1-dev", FLUX).replace('pipe("a red', 'torch.manual_seed(5); pipe("a red')}
found = np.asarray(Image.open(f"fox_{{os.environ['RANK']}}.png")).astype(int)
assert abs(found - expected).max() <= 1
print("exact")
"""
OURS = """
import numpy as np, torch
from diffusers import DiffusionPipeline

made = DiffusionPipeline.from_pretrained("my-pipeline")

def alone(prompt, seed):
    generator = torch.Generator().manual_seed(seed)
    return made(prompt, height=64, width=96, num_inference_steps=2, generator=generator).images[0]

def check(image, expected):
    difference = np.asarray(image).astype(int) - np.asarray(expected).astype(int)
    assert abs(difference).max() <= 1
"""
OUR_PROMPTS = f"""{OURS}
expected = [alone(prompt, seed) for seed, prompt in enumerate(["a dog", "a cat", "a bird"])]
{PROMPTS}
for image, other in zip(images, expected, strict=True):
    check(image, other)
print("exact")
"""
OUR_STAGES = f"""{OURS}
expected = alone("a dog", 42)
{STAGES}
check(image, expected)
print("exact")
"""
CLIP = "height=48, width=80, num_frames=5, num_inference_steps=2"
START = f"""
import numpy as np, torch
from diffusers import DiffusionPipeline

made = DiffusionPipeline.from_pretrained("my-pipeline")
expected = made("a red fox", generator=torch.Generator().manual_seed(0), {CLIP}).frames[0]
{tiny(snippet_of("start_pipeline.md", "cfg=2"), "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", CLIP)}
assert np.abs(frames - expected).max() < 1e-4
assert rank > 0 or os.path.exists("fox.mp4")
print("exact")
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
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pipelines as diffusers writes them."""
    folder = tmp_path_factory.mktemp("pipelines")
    for name in ("wan", "flux"):
        PIPES[name].pipe().save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize(
    ("script", "pipeline", "ranks", "pictures"),
    [
        (IN_README, "flux", 2, {"fox_0.png", "fox_1.png"}),
        (CALLED, "wan", 4, set()),
        (START, "wan", 4, set()),
        (CALLED_OFTEN, "wan", 4, set()),
        (LOOP, "wan", 4, set()),
        (OUR_PROMPTS, "flux", 2, {"ours_0.png", "ours_1.png", "ours_2.png"}),
        (OUR_STAGES, "flux", 2, {"our_stages.png"}),
    ],
    ids=["README", "sampling.md", "start", "many calls", "own loop", "our prompts", "our stages"],
)
@pytest.mark.default(1)
def test_code_of_the_docs_gives_one_processs_samples(
    script: str, pipeline: str, ranks: int, pictures: set[str], pipelines: Path, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "my-pipeline").symlink_to(pipelines / pipeline)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = warm.run_ranks(ranks, [sys.executable, "script.py"], env=environment, cwd=tmp_path, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("exact") == ranks
    assert {path.name for path in tmp_path.glob("*.png")} == pictures
