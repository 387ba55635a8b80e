"""Short sampling loops with diffusers' step caches: what each step computed, and its outputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
    TextKVCacheConfig,
)
from torch import Tensor, nn

from lightning_cp.engine.check import KeepFloat64
from tests.models import TINY

# Distance of each step's latents from the first ones, along one direction: some steps change little, some much.
PATH = (0.0, 0.01, 0.02, 0.6, 0.61, 1.4, 1.41, 1.42)
STEPS = len(PATH)
_TIMES = torch.linspace(900.0, 20.0, STEPS)


@dataclass
class Run:
    """What the forwards of a loop computed: names of the linear layers that ran, and the output, per forward."""

    ran: list[frozenset[str]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def skips(self) -> list[bool]:
        """For each forward, whether it skipped something that an earlier forward computed."""
        return [ran < max(self.ran, key=len) for ran in self.ran]

    def error(self, expected: Run) -> float:
        """The largest relative error of any output."""
        pairs = zip(self.outputs, expected.outputs, strict=True)
        return max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)


@dataclass
class Clock:
    """The timestep of the current step, for caches that ask for it."""

    step: int = 0

    def __call__(self) -> float:
        return float(_TIMES[self.step])


def config(name: str, clock: Clock) -> Any:
    """The settings of a cache."""
    at = {"current_timestep_callback": clock}
    return {
        "first_block": lambda: FirstBlockCacheConfig(threshold=0.05),
        "mag": lambda: MagCacheConfig(
            threshold=0.08, retention_ratio=0.2, num_inference_steps=STEPS, mag_ratios=[1.0, 1.1, 0.97, 1.02] * 2
        ),
        "mag_calibration": lambda: MagCacheConfig(num_inference_steps=2 * STEPS, calibrate=True),
        "taylorseer": lambda: TaylorSeerCacheConfig(
            cache_interval=3,
            disable_cache_before_step=2,
            cache_identifiers=[r".*blocks\.\d\.attn1?"],
            taylor_factors_dtype=torch.float64,
        ),
        "taylorseer_lite": lambda: TaylorSeerCacheConfig(
            cache_interval=2, disable_cache_before_step=2, use_lite_mode=True, taylor_factors_dtype=torch.float64
        ),
        "broadcast": lambda: PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            cross_attention_block_skip_range=3,
            cross_attention_block_identifiers=("blocks",),
            **at,
        ),
        "faster": lambda: FasterCacheConfig(
            spatial_attention_timestep_skip_range=(-1, 800),
            unconditional_batch_timestep_skip_range=(-1, 800),
            unconditional_batch_skip_range=3,
            attention_weight_callback=lambda _: 0.3,
            **at,
        ),
        "sea": lambda: SeaCacheConfig(threshold=0.2),
        "text": TextKVCacheConfig,
    }[name]()


def moved(arguments: dict[str, Any], step: int) -> dict[str, Any]:
    """The arguments of a step."""
    generator = torch.Generator().manual_seed(3)

    def shifted(x: Tensor) -> Tensor:
        """Tokens change differently, so the shards of one rank alone would give another decision."""
        dim = 1 if x.ndim == 3 else x.ndim - (1 if x.shape[-2] == 1 else 2)
        growing = torch.linspace(0.0, 2.0, x.shape[dim], dtype=x.dtype).view(-1, *[1] * (x.ndim - 1 - dim))
        return x + PATH[step] * growing * torch.randn(x.shape, generator=generator, dtype=x.dtype)

    if "vision_tokens" in arguments:
        return {**arguments, "vision_tokens": [shifted(x) for x in arguments["vision_tokens"]]}
    return {**arguments, "hidden_states": shifted(arguments["hidden_states"])}


@contextmanager
def recording(model: nn.Module, run: Run) -> Iterator[None]:
    """Context in which each forward adds an entry to `run.ran`: the linear layers of blocks that ran."""
    names = {module: path for path, module in model.named_modules() if isinstance(module, nn.Linear)}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        run.ran[-1] |= {names[module]}

    handles = [module.register_forward_hook(note) for module in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def loop(
    model: Any,
    arguments: dict[str, Any],
    clock: Clock,
    *,
    contexts: Sequence[str] = ("cond",),
    steps: Sequence[int] = tuple(range(STEPS)),
    call: Callable[[dict[str, Any]], Any] | None = None,
    float64: bool = True,
) -> Run:
    """Run a loop without gradients; each context has texts of its own.

    Args: float64: keep float64 where the model's code casts to float32; False for compiled blocks, since dynamo fails
        with a function mode (NameError in code that it resumes after a graph break).
    """
    run, text = Run(), arguments.get("encoder_hidden_states")
    texts = [None if text is None else text * (1 - 0.4 * number) for number in range(len(contexts))]
    keep = KeepFloat64() if float64 else nullcontext()
    with recording(model, run), torch.no_grad(), keep, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of FasterCache's torch.meshgrid
        for step in steps:
            clock.step = step
            given = moved(arguments, step)
            for number, context in enumerate(contexts):
                if text is not None:
                    given = {**given, "encoder_hidden_states": texts[number]}
                where = {"step_index": step, "sigma": 1 - step / STEPS, "num_inference_steps": STEPS}
                run.ran.append(frozenset())
                with model.cache_context(context, **where):
                    out = call(given) if call is not None else model(**given, return_dict=False)
                out = out if isinstance(out, Tensor) else out[0]
                run.outputs.append((out[0] if isinstance(out, (list, tuple)) else out).clone())
    return run


def shorter(name: str) -> Any:
    """Return a tiny model; if its size can be changed, with tokens that 3 does not divide."""
    return TINY[name].but({"frames": 2, "height": 4}) if name == "wan" else TINY[name]  # 2 x 2 x 5 tokens
