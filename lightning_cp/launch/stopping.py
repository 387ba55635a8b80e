"""Handle stop signals: finish the current step, write a checkpoint, then end. Imports no torch."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from lightning_cp.launch import channel

# SIGTERM: from a launcher or a cluster. SIGINT: from the keyboard. SIGUSR1: from SLURM, before the job's time limit
# (sbatch --signal=USR1@60).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stopped(Exception):
    """Training ended early on a stop signal; its progress is in a checkpoint."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number, self.exit_code = number, 128 + number


class StopRequest:
    """Context that records stop signals instead of letting them end the process.

    Attributes: number: number of the received signal; 0: none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        try:
            self._before = {number: signal.signal(number, self._record) for number in STOP_SIGNALS}
        except ValueError:  # not the main thread, where Python cannot set signal handlers
            self._before = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        channel.send({"kind": "stop_confirmed"}, timeout_s=0, wait=False)  # the launcher then waits for the checkpoint
