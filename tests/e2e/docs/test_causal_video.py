"""docs/sparse_and_causal.md: rollouts, self-forcing and teacher forcing on several ranks, as in one process."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from warnings import catch_warnings

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_cp import ContextParallelConfig, KeyCache, apply_context_parallel
from lightning_cp.errors import ShapeError
from tests.dist.compare import averaged, of_first_rank, worst
from tests.e2e.docs.test_docs_pages import run, write_files
from tests.e2e.recipe import ROOT
from tests.harness import RankPool
from tests.models.modes import MODES

CHUNKS = 8


_VARIANTS = {
    "": ("$", ""),
    "checkpointed": (r"= block\((.*)\)", r"= checkpoint(block, \1, use_reentrant=False)"),
    "compiled": ("$", ""),
    "masked": (r"attention\(q, k, v\)", "attention(q, k, v, attn_mask=cache.query_mask(lambda q, k: (q + k) % 3 > 0))"),
}


def page(variant: str = "") -> dict[str, Any]:
    """The names in the page's first script. Args: variant: one of `_VARIANTS`."""
    text = (ROOT / "docs/sparse_and_causal.md").read_text()
    (script,) = re.findall(r"```python\n# causal_video.py\n(.*?)```", text, re.DOTALL)
    script, count = re.subn(*_VARIANTS[variant], script)
    assert count
    module = ModuleType("causal_video")
    module.__dict__["checkpoint"] = checkpoint
    sys.modules[module.__name__] = module  # the engine replaces flex_attention in imported modules
    exec(script, vars(module))
    return vars(module)


Outcome = tuple[list[Tensor], dict[str, Tensor | None], KeyCache]


def _run(mode: str | None, world: int, variant: str = "") -> Outcome:
    """Outputs of rollouts, with masks and with teacher forcing; the loss of self-forcing and gradients; a cache."""
    code, config = page(variant), ContextParallelConfig() if mode is None else MODES[mode](world)
    torch.manual_seed(0)
    model, size, channels = code["CausalVideo"]().double(), code["CHUNK"], code["CHANNELS"]
    noise, target = (torch.randn(2, n * size, channels, dtype=torch.float64) for n in (CHUNKS, 1))
    if mode is not None:
        apply_context_parallel(model, config, code["PLAN"])
        for block in model.blocks if variant == "compiled" else ():
            block.compile(backend="aot_eager")

    def caches(**settings: int) -> list[KeyCache]:
        return [KeyCache(config, **settings) for _ in model.blocks]

    with torch.no_grad():
        outputs = [code["rollout"](model, noise, kept := caches(window=2, sinks=1))]
        if not variant:
            outputs += _forwards(code, model, noise, kept, caches())
    loss = code["self_forcing"](model, noise, target, caches(window=2, sinks=1))
    loss.backward()
    gradients = {name: None if x.grad is None else x.grad.clone() for name, x in model.named_parameters()}
    return [*outputs, loss.detach()], gradients, kept[0]


def _forwards(code: dict[str, Any], model: Any, clean: Tensor, kept: list[KeyCache], trail: list[KeyCache]) -> Any:
    """The last chunk with a block mask, and all chunks with teacher forcing, which must equal chunk after chunk."""
    size, forced, noisy = code["CHUNK"], [], torch.randn_like(clean)
    for chunk, (x, part) in enumerate(zip(clean.split(size, 1), noisy.split(size, 1), strict=True)):
        forced.append(code["velocity"](model, part, 0.7, trail, chunk))
        code["velocity"](model, x, 0.0, trail, chunk)
    mask = code["create_block_mask"](lambda b, h, q, k: (q + k) % 3 > 0, None, None, size, 3 * size, "cpu", size)
    positions = torch.arange((CHUNKS - 1) * size, CHUNKS * size)
    with catch_warnings(action="ignore"):  # one process computes flex_attention without compiling it
        in_one = code["teacher_forcing"](model, clean, noisy, 0.7)
        masked = model(noisy[:, -size:], noisy.new_ones(2, 1), positions, kept, CHUNKS - 1, mask)
    assert float((in_one - torch.cat(forced, 1)).abs().max()) < 1e-12
    return in_one, masked


def _compared(rank: int, world: int, mode: str, variant: str) -> tuple[float, float, int]:
    expected, gradients = of_first_rank(lambda: _run(None, 1, variant)[:2])
    with catch_warnings(action="ignore" if variant == "compiled" else None):  # dynamo reads `grad` of every tensor
        outputs, found, cache = _run(mode, world, variant)
    error = max(float((x - y).abs().max()) for x, y in zip(outputs, expected, strict=True))
    return error, worst(averaged(found, world), gradients), cache.key.shape[1]


CASES = [("ring", 3, ""), ("rotation", 3, "checkpointed"), ("ulysses", 3, "masked"), ("ring", 3, "masked")]
CASES += [("unified", 4, ""), ("ring", 2, "compiled")]


@pytest.mark.parametrize(("mode", "world", "variant"), CASES)
@pytest.mark.default(1)
def test_rollouts_and_gradients_are_those_of_one_process(
    run_ranks: RankPool, mode: str, world: int, variant: str
) -> None:
    everyone = run_ranks(world, _compared, mode, variant)
    for error, gradient, _ in everyone:
        assert error < 1e-12
        assert gradient < 1e-12
    assert sum(keys for _, _, keys in everyone) == 30, "the first chunk and the last two, of 10 tokens"


def _refused(rank: int, world: int) -> list[str]:
    code, said = page(), []
    model = code["CausalVideo"]()
    apply_context_parallel(model, MODES["ring"](world), code["PLAN"])
    x = torch.randn(2, code["CHUNK"], code["CHANNELS"])
    with torch.no_grad():
        kept = [KeyCache(MODES["ring"](world)) for _ in model.blocks]
        code["velocity"](model, x, 0.5, kept, 0)
        for caches, chunk, sample in (([KeyCache()] * 2, 0, x), (kept, 2, x), (kept, 1, x[:1])):
            with pytest.raises(ShapeError) as error:
                code["velocity"](model, sample, 0.5, caches, chunk)
            said.append(str(error.value))
    return said


@pytest.mark.full
def test_wrong_caches_are_refused_on_every_rank(run_ranks: RankPool) -> None:
    for degrees, order, batch in run_ranks(3, _refused):
        assert "make the cache with the parallel_config (and shares) of the model" in degrees
        assert "chunk=2 cannot follow the 1 chunks of this cache" in order
        assert "differ in batch" in batch


@pytest.mark.full
def test_the_script_prints_the_same_at_ring_1_and_3(tmp_path: Path) -> None:
    write_files("sparse_and_causal.md", tmp_path)
    printed = [run(tmp_path, "train_causal.py", str(ring)) for ring in (1, 3)]
    numbers = [re.findall(r"(?:loss|clip) (\S+?),?\s", text) for text in printed]
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == 4
