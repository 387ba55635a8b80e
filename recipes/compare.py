"""Measures the exactness of diffusers' own context parallelism and of ours, side by side, on 3 CPU ranks in float64.

    python recipes/compare.py

Prints the table that README shows. diffusers has no CPU kernel for its ring, so it is given ours; everything else of
it runs as shipped. An entry is the largest error relative to one process's largest value, or the error it raises.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_cp.launch import Job, LocalLauncher

RANKS = 3
HEADS, HEAD_DIM = 6, 8


def measure(config: DictConfig) -> None:
    """Compare on every rank; rank 0 prints."""
    import warnings

    import diffusers
    import torch.distributed as dist

    from lightning_cp.plans import REGISTERED

    warnings.filterwarnings("ignore", category=FutureWarning)  # of functions that diffusers calls
    diffusers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    even, uneven = [16] * RANKS, [17, 16, 14]
    loose = {"ulysses": RANKS, "anything": "ulysses_anything"}
    rows = [
        ("ring, gradients", {"lengths": even, "ring": RANKS}),
        ("ring with padded keys, output", {"lengths": even, "ring": RANKS, "masked": True, "gradients": False}),
        ("ring, uneven lengths, gradients", {"lengths": uneven, "ring": RANKS, "anything": "ring_anything"}),
        ("Ulysses, gradients", {"lengths": even, "ulysses": RANKS}),
        ("Ulysses with padded keys, gradients", {"lengths": even, "ulysses": RANKS, "masked": True}),
        ("Ulysses, uneven lengths, gradients", {"lengths": uneven, **loose}),
        (
            "Ulysses, 5 heads, gradients",
            {"lengths": even, "heads": 5, **loose},
        ),
        ("ring, causal, gradients", {"lengths": even, "ring": RANKS, "causal": True}),
        ("ring, 2 key heads for 6, gradients", {"lengths": even, "ring": RANKS, "kv_heads": 2}),
    ]
    table = [(name, _told(_theirs, case), _told(_ours, case)) for name, case in rows]
    table.append(("a model on CPU", _told(_model_on_cpu, {}), "works"))
    plans = [getattr(getattr(diffusers, name), "_cp_plan", None) for name in dir(diffusers) if "Transformer" in name]
    table.append(("model classes with a plan", str(sum(plan is not None for plan in plans)), str(len(REGISTERED))))
    dist.destroy_process_group()
    if rank == 0:
        print(f"| {RANKS} ranks, float64 | diffusers {diffusers.__version__} | lightning_cp |\n|---|---|---|")
        for row in table:
            print(f"| {' | '.join(row)} |")


def _told(measured: Callable[..., float], case: dict[str, Any]) -> str:
    """An error as a number, or the exception that came instead, the same on all ranks."""
    import torch.distributed as dist

    try:
        told: Any = measured(**case)
    except Exception as error:
        told = type(error).__name__
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, told)
    raised = [x for x in everyone if isinstance(x, str)]
    return f"{raised[0]}" if raised else f"{max(everyone):.0e}"


def _compare(attend: Callable[..., Any], lengths: list[int], **case: Any) -> float:
    """Largest relative error of `attend` on this rank's tokens against plain attention on all of them."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F

    generator = torch.Generator().manual_seed(0)
    heads, kv_heads = case.get("heads", HEADS), case.get("kv_heads", case.get("heads", HEADS))
    whole = [
        torch.randn(2, sum(lengths), h, HEAD_DIM, generator=generator, dtype=torch.float64, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    ]
    grad_out = torch.randn(2, sum(lengths), heads, HEAD_DIM, generator=generator, dtype=torch.float64)
    mask = torch.ones(2, sum(lengths), dtype=torch.bool)
    if case.get("masked"):
        mask[1, sum(lengths) // 2 :] = False
    q, k, v = (x.transpose(1, 2) for x in whole)
    settings = {"is_causal": case.get("causal", False), "enable_gqa": heads != kv_heads}
    out = F.scaled_dot_product_attention(q, k, v, mask[:, None, None] if case.get("masked") else None, **settings)
    expected = [out.transpose(1, 2), *torch.autograd.grad(out, whole, grad_out.transpose(1, 2), retain_graph=True)]
    mine = slice(sum(lengths[: dist.get_rank()]), sum(lengths[: dist.get_rank() + 1]))
    local = [x.detach()[:, mine].clone().requires_grad_() for x in whole]
    found = attend(*local, mask[:, None, None, mine] if case.get("masked") else None, **settings)
    results = [found]
    if case.get("gradients", True):
        results += torch.autograd.grad(found, local, grad_out[:, mine])
    pairs = list(zip(results, expected))[case.get("gradients", True) :]
    return max(float((a - b[:, mine]).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)


def _ours(*, lengths: list[int], ring: int = 1, ulysses: int = 1, anything: str = "", **case: Any) -> float:
    from lightning_cp import ContextParallelConfig, context_parallel_attention

    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)

    def attend(q: Any, k: Any, v: Any, mask: Any, **settings: Any) -> Any:
        return context_parallel_attention(q, k, v, mask, parallel_config=config, **settings)

    return _compare(attend, lengths, **case)


def _theirs(*, lengths: list[int], ring: int = 1, ulysses: int = 1, anything: str = "", **case: Any) -> float:
    import torch

    from lightning_cp.app.benchmark.peers import diffusers_attention

    flags = {anything: True} if anything else {}
    attend = diffusers_attention(torch.device("cpu"), ring=ring, ulysses=ulysses, convert_to_fp32=False, **flags)
    return _compare(attend, lengths, **case)


def _model_on_cpu() -> float:
    import diffusers

    model = diffusers.WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, num_layers=1, ffn_dim=8)
    model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=RANKS))
    return 0.0


def main() -> int:
    """Starts the ranks."""
    # Where diffusers raises, it leaves collectives without a wait; torch would warn of them when the ranks end.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(prefix="lightning_cp_") as folder:
        settings = Path(folder) / "settings.yaml"
        settings.write_text("{}")
        target = f"{os.path.abspath(__file__)}:measure"
        result = LocalLauncher().launch(Job(target, settings, RANKS, Path(folder) / "logs", threads=1))
    if result.failure is not None:
        print(f"error: {result.failure.describe()}", file=sys.stderr)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
