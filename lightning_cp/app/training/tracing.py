"""One step of a run as PyTorch's profiler sees it, written by every rank for chrome://tracing or Perfetto."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from torch.profiler import profile

from lightning_cp.comm.tracing import traced


@dataclass
class StepTrace:
    """Recorded from its forward to the end of its step; writing it takes time of the next.

    Args:
        step: its number, counted from 1; None: no step is recorded.
        path: of this rank's file.
    """

    step: int | None
    path: Path
    _found: profile | None = field(default=None, init=False)
    _recording: ExitStack = field(default_factory=ExitStack, init=False)

    def begin(self, step: int) -> None:
        """Before the forward of the step with this number."""
        if step == self.step:
            self._found = self._recording.enter_context(traced())

    def end(self) -> None:
        """After a step: writes the file, if that step was recorded."""
        if self._found is None:
            return
        self._recording.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._found.export_chrome_trace(str(self.path))
        self._found = None
