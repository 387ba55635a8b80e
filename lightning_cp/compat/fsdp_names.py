"""Private names of torch's FSDP2."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule


def renew_fsdp_dtypes(unit: FSDPModule) -> None:
    """Read the dtypes in which FSDP2 reduces gradients again. It reads them before the first forward only.

    Raises: AssertionError: the trained weights of the unit have several dtypes.
    """
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None:
            group._init_mp_dtypes()
