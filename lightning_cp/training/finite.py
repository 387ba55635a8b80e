"""Find and name non-finite losses, gradients and weights; all ranks get the same result."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor

from lightning_cp.errors import NonFiniteError
from lightning_cp.training.ranks import Ranks

MOST_SKIPPED_IN_A_ROW = 100  # weights do not change between skipped steps, so skipping would never end
_SHOWN = 3
_REMEDIES = (
    "use a lower optim.lr, a longer warmup_steps, a lower gradient_clip_val or precision=bf16-mixed (32-true where it "
    "is that already), and look for inf and NaN in the data"
)


@dataclass
class StepGuard:
    """Decide after a backward pass whether the optimizer may use the gradients.

    The decision needs no extra communication and no device synchronisation: it uses means over all ranks that are
    already on the host, so it is the same on every rank.

    Args:
        on_nonfinite: `error` ends the run, `skip` skips the update, `ignore` applies it.
        scaler: gradient scaler of 16-mixed. While it searches for a scale, gradients overflow and it skips steps; this
            is an error only once its scale is below 1.
    """

    on_nonfinite: str = "error"
    scaler: GradScaler | None = None
    _skipped_in_a_row: int = 0

    def find(self, loss: float, norm: float) -> str:
        """Describe the non-finite value, or return "" if there is none (or only the scaler's overflow).

        Args: loss, norm: means over all ranks.
        """
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm) and not self._is_overflow_of_scale():
            return f"the norm of the gradient is {norm}"
        return ""

    def allows_update(self, loss: float, norm: float) -> bool:
        """Return True if the optimizer may step. Args: loss, norm: means over all ranks.

        Raises: NonFiniteError: `on_nonfinite` is `error`, or too many steps in a row were skipped.
        """
        if self.on_nonfinite == "ignore" or (math.isfinite(loss) and math.isfinite(norm)):
            self._skipped_in_a_row = 0
            return True
        cause = self.find(loss, norm)
        if cause and self.on_nonfinite == "error":
            raise NonFiniteError(cause)
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row > MOST_SKIPPED_IN_A_ROW:
            raise NonFiniteError(
                f"{cause or 'the gradient overflows'}, and {self._skipped_in_a_row - 1} steps were skipped"
            )
        return False

    def _is_overflow_of_scale(self) -> bool:
        return self.scaler is not None and self.scaler.is_enabled() and self.scaler.get_scale() >= 1


def find_nonfinite(named: Iterable[tuple[str, Sequence[Tensor]]], ranks: Ranks) -> list[str]:
    """Find the names of tensors with inf or NaN on any rank, with a single all-reduce.

    Args: named: (name, tensors), with equal names in equal order on all ranks. Each rank checks its DTensor shards.
    Ranks: all must call it.
    """
    names, flags = [], []
    for name, tensors in named:
        names.append(name)
        local = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
        none = torch.zeros((), dtype=torch.bool, device=ranks.device)
        flags.append(torch.stack([none, *((~torch.isfinite(x.detach())).any().to(ranks.device) for x in local)]).any())
    if not flags:
        return []
    fractions = ranks.all_reduce(torch.stack(flags).double(), reduce_op="mean").tolist()
    return [name for name, fraction in zip(names, fractions, strict=True) if fraction > 0]


def find_ranks(loss: Tensor, ranks: Ranks) -> str:
    """Name the ranks with a non-finite loss, for example " on rank 1, 3"; "" if none, or for a single process.

    Ranks: all must call it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ""
    losses = [(str(rank), [loss] if rank == ranks.global_rank else []) for rank in range(dist.get_world_size())]
    failed = find_nonfinite(losses, ranks)
    return f" on rank {', '.join(failed)}" if failed else ""


def shorten(names: list[str]) -> str:
    """Join the first names of a list, and add the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def advise(checkpoint: object | None) -> str:
    """Return advice for the error message: the last good checkpoint, and settings to change."""
    good = "This run has no checkpoint yet" if checkpoint is None else f"The last good checkpoint is {checkpoint}"
    return f"{good}: {_REMEDIES}."
