"""Compare the exactness of diffusers' own context parallelism and of ours on 3 CPU ranks in float64.

    lightning-cp compare

Prints the table in README. diffusers has no CPU kernel for its ring, so it uses ours here; the rest of it runs
unchanged. An entry is the largest error relative to one process's largest value, or the exception that was raised.
"""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from lightning_cp.recipes.runs.ranks import on_ranks, run_on_ranks
from lightning_cp.recipes.terminal import print_error

RANKS = 3
HEADS, HEAD_DIM = 6, 8


@on_ranks
def compare_with_diffusers(_: object) -> Iterator[tuple[str, str, str]]:
    """Compare on every rank; the rows are the table's, with its head."""
    import warnings

    import diffusers

    from lightning_cp.plans import REGISTERED

    warnings.filterwarnings("ignore", category=FutureWarning)  # of functions that diffusers calls
    diffusers.logging.set_verbosity_error()
    even, uneven = [16] * RANKS, [17, 16, 14]
    uneven_ulysses = {"ulysses": RANKS, "anything": "ulysses_anything"}
    rows = [
        ("ring, gradients", {"lengths": even, "ring": RANKS}),
        ("ring with padded keys, output", {"lengths": even, "ring": RANKS, "masked": True, "gradients": False}),
        ("ring, uneven lengths, gradients", {"lengths": uneven, "ring": RANKS, "anything": "ring_anything"}),
        ("Ulysses, gradients", {"lengths": even, "ulysses": RANKS}),
        ("Ulysses with padded keys, gradients", {"lengths": even, "ulysses": RANKS, "masked": True}),
        ("Ulysses, uneven lengths, gradients", {"lengths": uneven, **uneven_ulysses}),
        ("Ulysses, 5 heads, gradients", {"lengths": even, "heads": 5, **uneven_ulysses}),
        ("ring, causal, gradients", {"lengths": even, "ring": RANKS, "causal": True}),
        ("ring, 2 key heads for 6, gradients", {"lengths": even, "ring": RANKS, "kv_heads": 2}),
    ]
    yield f"{RANKS} ranks, float64", f"diffusers {diffusers.__version__}", "lightning_cp"
    for name, case in rows:
        yield name, _describe(_diffusers, case), _describe(_lightning_cp, case)
    yield "a model on CPU", _describe(_model_on_cpu, {}), "works"
    plans = [getattr(getattr(diffusers, name), "_cp_plan", None) for name in dir(diffusers) if "Transformer" in name]
    yield "model classes with a plan", str(sum(plan is not None for plan in plans)), str(len(REGISTERED))


def _describe(measured: Callable[..., float], case: dict[str, Any]) -> str:
    """Return the largest error of all ranks as text, or the name of the exception that a rank raised."""
    import torch.distributed as dist

    from lightning_cp.comm.agree import gather_objects

    try:
        outcome: Any = measured(**case)
    except Exception as error:
        outcome = type(error).__name__
    outcomes = gather_objects(outcome, dist.group.WORLD)
    raised = [x for x in outcomes if isinstance(x, str)]
    return raised[0] if raised else f"{max(outcomes):.0e}"


def _compare(attend: Callable[..., Any], lengths: list[int], **case: Any) -> float:
    """Return the largest relative error of `attend` on this rank's tokens, compared with plain attention."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F

    generator = torch.Generator().manual_seed(0)
    heads, kv_heads = case.get("heads", HEADS), case.get("kv_heads", case.get("heads", HEADS))
    full = [
        torch.randn(2, sum(lengths), h, HEAD_DIM, generator=generator, dtype=torch.float64, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    ]
    grad_out = torch.randn(2, sum(lengths), heads, HEAD_DIM, generator=generator, dtype=torch.float64)
    mask = torch.ones(2, sum(lengths), dtype=torch.bool)
    if case.get("masked"):
        mask[1, sum(lengths) // 2 :] = False
    q, k, v = (x.transpose(1, 2) for x in full)
    settings = {"is_causal": case.get("causal", False), "enable_gqa": heads != kv_heads}
    out = F.scaled_dot_product_attention(q, k, v, mask[:, None, None] if case.get("masked") else None, **settings)
    expected = [out.transpose(1, 2), *torch.autograd.grad(out, full, grad_out.transpose(1, 2), retain_graph=True)]
    local_slice = slice(sum(lengths[: dist.get_rank()]), sum(lengths[: dist.get_rank() + 1]))
    local = [x.detach()[:, local_slice].clone().requires_grad_() for x in full]
    result = attend(*local, mask[:, None, None, local_slice] if case.get("masked") else None, **settings)
    results = [result]
    if case.get("gradients", True):
        results += torch.autograd.grad(result, local, grad_out[:, local_slice])
    pairs = list(zip(results, expected))[case.get("gradients", True) :]
    return max(float((a - b[:, local_slice]).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)


def _lightning_cp(*, lengths: list[int], ring: int = 1, ulysses: int = 1, anything: str = "", **case: Any) -> float:
    from lightning_cp.attention import context_parallel_attention
    from lightning_cp.config import ContextParallelConfig

    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)

    def attend(q: Any, k: Any, v: Any, mask: Any, **settings: Any) -> Any:
        return context_parallel_attention(q, k, v, mask, parallel_config=config, **settings)

    return _compare(attend, lengths, **case)


def _diffusers(*, lengths: list[int], ring: int = 1, ulysses: int = 1, anything: str = "", **case: Any) -> float:
    import torch

    from lightning_cp.recipes.diffusers_attention import diffusers_attention

    flags = {anything: True} if anything else {}
    attend = diffusers_attention(torch.device("cpu"), ring=ring, ulysses=ulysses, convert_to_fp32=False, **flags)
    return _compare(attend, lengths, **case)


def _model_on_cpu() -> float:
    import diffusers

    model = diffusers.WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, num_layers=1, ffn_dim=8)
    model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=RANKS))
    return 0.0


def main() -> int:
    """Start the ranks. Returns: the exit code."""
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return 0
    if sys.argv[1:]:
        print_error(f"{sys.argv[1]} is not valid: lightning-cp compare has no settings")
        return 2
    # Where diffusers raises, it leaves collectives without a wait; torch would warn of them when the ranks end.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    rows, result = run_on_ranks(compare_with_diffusers, {}, RANKS, limit_s=1800)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    print("\n".join([*lines[:1], "|---|---|---|", *lines[1:]]))
    if result.failure is not None:
        print_error(result.failure.describe())
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
