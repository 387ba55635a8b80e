"""Being told to stop: a signal asks, the step under way is finished, a checkpoint is written. Imports no torch."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from lightning_cp.comm import channel

# SIGTERM: from a launcher or a cluster. SIGINT: from the keyboard. SIGUSR1: from SLURM, some time before the job's end
# (sbatch --signal=USR1@60).
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stopped(Exception):
    """Training ended early because it was asked to; what was done is in a checkpoint."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number, self.exit_code = number, 128 + number


class StopRequest:
    """Within it, the signals that ask to stop are noted instead of ending the process.

    Attributes: number: of the signal that came; 0: none did.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        try:
            self._before = {number: signal.signal(number, self._note) for number in ASKING}
        except ValueError:  # not the main thread: whoever owns it handles its signals
            self._before = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        channel.send({"kind": "heard"}, patience_s=0, wait=False)  # to the launcher: a checkpoint will be written
