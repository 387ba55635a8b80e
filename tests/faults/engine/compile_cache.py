"""Compile a parallel model with inductor on two new ranks, and print the hits and misses of the FX graph cache.

python -m tests.faults.engine.compile_cache <rank> <file of the rendezvous>
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from lightning_cp import ContextParallelConfig, apply_context_parallel
from tests.models import TINY


def main(rank: int, file: str) -> None:
    """Run forward and backward of the compiled model once: two graphs."""
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    model, arguments = TINY["wan"].build(), TINY["wan"].arguments()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=2))
    compiled = torch.compile(model, fullgraph=True)
    out = compiled(**arguments)
    (out if isinstance(out, torch.Tensor) else out[0]).square().mean().backward()
    found = counters["inductor"]
    print("cache", found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], found["fxgraph_cache_bypass"], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
