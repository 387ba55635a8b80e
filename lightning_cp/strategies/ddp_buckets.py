"""The order in which DistributedDataParallel adds up gradients, the same in every step of every run."""

import torch
from torch.nn.parallel import DistributedDataParallel


def build_ddp_buckets(ddp: DistributedDataParallel) -> DistributedDataParallel:
    """Lays out the buckets of gradients for good, with one backward that costs nothing.

    DDP lays them out anew after its first backward, and with the layout the order changes in which ranks are added:
    the first step of a run that goes on from a checkpoint would differ in its last bits from the same step of the run
    that wrote it. Here that first backward is of zeros, in the reverse order of the parameters, before training.

    Where DDP keeps its first layout (`find_unused_parameters`), or watches the first step of training
    (`static_graph`), or where parameters have hooks of their own, which would see these gradients, nothing is done.

    Returns: the same.
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
