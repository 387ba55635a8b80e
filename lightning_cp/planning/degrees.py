"""Choose the ring and Ulysses degrees of a training run; strategy and activation checkpointing are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_cp.planning.devices import DEVICES, GB, Device, name_in_table
from lightning_cp.planning.layouts import layouts
from lightning_cp.planning.request import Request, closest
from lightning_cp.planning.search import OF_EVERY_LAYOUT, ranked, search, why


@dataclass(frozen=True)
class Degrees:
    """The chosen degrees. Attributes: reason: one line for the log, which begins with the degrees."""

    ring: int
    ulysses: int
    reason: str


def choose_degrees(request_of: Callable[[int], Request | None], ranks: int, fixed: dict[str, object]) -> Degrees:
    """Search the degrees that the settings allow.

    Args:
        request_of: returns the request for a number of data ranks; None: the batch cannot be divided over them.
        fixed: fields of `Layout` that are not changed, with their values.
    Raises: ValueError: no degrees are possible, nothing fits in memory, the model has no plan, or its forward cannot be
        traced.
    """
    results, problems = [], []
    for data in sorted({x.data for x in layouts(ranks, "train", fixed)}, reverse=True):
        request = request_of(data)
        if request is None:
            problems.append(f"the batch cannot be divided over {data} data ranks")
            continue
        try:
            results.append(search(replace(request, fixed={**fixed, "data": data})))
        except OF_EVERY_LAYOUT:
            raise
        except ValueError as error:
            problems.append(str(error))
    requests = {choice.layout: x.request for x in results for choice in x.choices}
    if requests:
        choices, equal = ranked(choice for x in results for choice in x.choices)
        best = choices[0].layout
        reason = why(choices, equal, requests[best]).partition(": ")[2]
        return Degrees(best.ring, best.ulysses, f"ring={best.ring} ulysses={best.ulysses}: {ranks} ranks; {reason}")
    if not results:
        given = "" if problems else f" with {', '.join(f'{name}={value}' for name, value in fixed.items())}"
        reasons = f": {'; '.join(dict.fromkeys(problems))}" if problems else ""
        raise ValueError(f"no degrees are possible on {ranks} ranks{given}{reasons}")
    closest_result = min(results, key=lambda x: closest(x.excluded).needs_bytes)
    raise ValueError(f"{closest_result.reason}, strategy=cp_fsdp or activation_checkpointing=full")  # both are given


def device_of(gpu: tuple[str, int] | None, node_ranks: int) -> Device:
    """Return a device of the table by the name that CUDA reports.

    Args: gpu: name, and bytes of memory; None: the CPU. node_ranks: ranks of a node.
    Raises: ValueError: the GPU is not in the table.
    """
    if gpu is None:
        return replace(DEVICES["cpu"], node_ranks=node_ranks)
    name, memory = gpu
    found = name_in_table(name)
    if found is None:
        known = ", ".join(device.name for device in DEVICES.values())
        raise ValueError(
            f"the figures of {name} are not known, only those of {known}: set the degrees by hand; lightning-cp plan "
            "proposes them with figures that you give"
        )
    return replace(DEVICES[found], memory_gb=memory / GB, node_ranks=node_ranks)
