"""Measure the best layouts of a plan on this machine, and let the measurements decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from omegaconf import DictConfig

from lightning_cp.app.benchmark.measure import low_quartile
from lightning_cp.app.planning.ranks import Case, Measured, run_on_ranks
from lightning_cp.app.settings.table import SettingsError
from lightning_cp.launch import FailureKind, Machine
from lightning_cp.launch.machine import describe_gpu
from lightning_cp.planning.devices import GB, name_in_table
from lightning_cp.planning.layouts import described
from lightning_cp.planning.request import Choice, Plan, Request
from lightning_cp.planning.search import ranked
from lightning_cp.rules import Integer

CLASS = 1.05  # measured layouts within this factor of the fastest are equal
_REPEATS, _LIMIT_S = 5, 900.0


class StoppedError(Exception):
    """A signal stopped the measurement. Attributes: exit_code: exit code for the command."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def check_measure(number: object, request: Request) -> None:
    """Check that this machine can run the layouts. Raises: SettingsError: it cannot, or `number` is not valid."""
    if not Integer(0).passes(number):
        raise SettingsError(f"measure={number} must be an integer of at least 0: the number of layouts to run")
    if not number:
        return
    machine, device = Machine.this(), request.device
    kind = "cuda" if machine.gpus else "cpu"
    if device.kind != kind:
        raise SettingsError(
            f"measure={number} runs on this machine, and gpu={device.name} is no device of it ({kind}): use gpu=auto, "
            "or measure=0"
        )
    most = machine.gpus if kind == "cuda" else machine.max_cpu_ranks
    if request.ranks > most:
        devices = f"{most} GPUs" if kind == "cuda" else f"{machine.cores} cores, for at most {most} ranks"
        raise SettingsError(f"measure={number}: ranks={request.ranks}, but this machine has {devices}; use measure=0")
    if kind == "cuda":
        here, planned = (name_in_table(x) for x in ((describe_gpu() or ("", 0))[0], device.name))
        if here and planned and here != planned:
            raise SettingsError(f"measure={number} runs on this machine, an {here}: use gpu=auto instead of {planned}")


def measured(
    plan: Plan, number: int, settings: DictConfig, folder: Path, report: Callable[[str], object] = print
) -> Plan:
    """Run the first layouts of a plan, each on ranks that are started for it, and choose the fastest one.

    A layout that fails is replaced by the next one; at most `2 * number` are tried.

    Args:
        number: number of layouts to measure.
        settings: settings of lightning-cp plan.
        folder: for the logs of the ranks.
        report: called with one line for each layout.
    Returns: the plan with the measured layouts first. The order does not change if all fail.
    Raises: StoppedError: a signal stopped it.
    """
    tried: list[Choice] = []
    for choice in plan.choices[: 2 * number]:
        if sum(x.measured_s is not None for x in tried) == number:
            break
        tried.append(_run(choice, len(tried), plan.request, settings, folder))
        found = tried[-1]
        shown = f"failed: {found.failure}" if found.measured_s is None else f"{1e3 * found.measured_s:,.1f} ms"
        report(f"measured {described(choice.layout)}: {shown}")
    choices, equal = ranked(
        (x for x in tried if x.measured_s is not None), within=CLASS, seconds=attrgetter("measured_sample_s")
    )
    rest = (*(x for x in tried if x.measured_s is None), *plan.choices[len(tried) :])
    if not choices:
        return replace(plan, choices=rest)
    return replace(plan, choices=(*choices, *rest), equal=equal, reason=_why(choices, equal, plan))


def _run(choice: Choice, index: int, request: Request, settings: DictConfig, folder: Path) -> Choice:
    found = run_on_ranks(
        [Case(settings, [choice.layout])],
        request.ranks,
        folder / "logs" / f"layout_{index}",
        kind=request.device.kind,
        repeats=_REPEATS,
        limit_s=_LIMIT_S,
    )
    if isinstance(found, Measured):
        return replace(choice, measured_s=low_quartile(found.seconds[0][0]))
    message = " ".join(found.message.split())
    if found.kind is FailureKind.STOPPED:
        raise StoppedError(message, found.exit_code)
    return replace(choice, failure=message[:300])


def _why(choices: tuple[Choice, ...], equal: int, plan: Plan) -> str:
    best, first = choices[0], plan.choices[0].layout
    assert best.measured_s is not None, "choices were measured"
    others = f"the fastest of {len(choices)} measured layouts"
    if equal > 1:
        others = f"the simplest of {equal} within 5 % of the fastest of {len(choices)} measured layouts"
    changed = "" if best.layout == first else f"; predictions alone chose {described(first)}"
    used = best.peak_bytes / GB + plan.request.reserved_gb
    return (
        f"{described(best.layout)}: {others}, {1e3 * best.measured_s:,.1f} ms a step "
        f"(predicted {1e3 * best.times.seconds:,.1f} ms), {used:.1f} of {plan.request.memory:g} GB{changed}"
    )
