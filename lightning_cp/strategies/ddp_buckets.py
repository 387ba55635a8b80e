"""Fix the order in which DistributedDataParallel sums gradients, so that every step of every run uses the same one."""

import torch
from torch.nn.parallel import DistributedDataParallel


def build_ddp_buckets(ddp: DistributedDataParallel) -> DistributedDataParallel:
    """Build the final gradient buckets before training, with one backward of empty slices.

    DDP rebuilds its buckets after its first backward, which changes the summation order over ranks. The first step of
    a resumed run would then differ in its last bits from the same step of the original run. Here the first backward
    has zero gradients, in reverse parameter order, before training.

    Nothing is done if DDP keeps its first buckets (`find_unused_parameters`) or records the first training step
    (`static_graph`), or if parameters have hooks, which would see these gradients.

    Returns: the same object.
    Ranks: the whole world.
    """
    parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
    hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) or p._backward_hooks for p in parameters)
    if ddp.find_unused_parameters or ddp.static_graph or ddp.process_group.size() == 1 or hooked:
        return ddp
    gradients = [parameter.grad for parameter in parameters]
    ddp.zero_grad(set_to_none=True)
    with torch.enable_grad():
        nothing = torch.stack([parameter.flatten()[:0].float().sum() for parameter in parameters]).sum()
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])
    nothing.backward()  # type: ignore[no-untyped-call]
    ddp.reducer._rebuild_buckets()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return ddp
