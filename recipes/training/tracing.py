"""Trace one step with PyTorch's profiler; every rank writes a file for chrome://tracing or Perfetto."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from torch.profiler import profile

from lightning_cp.comm.stats import traced
from lightning_cp.files import writing_new


@dataclass
class StepTrace:
    """Record one step from `begin` to `end`, and write the trace file.

    The next step's reported time includes writing the file.

    Args:
        step: step to record, counted from 1; None: record no step.
        path: path of this rank's trace file.
    """

    step: int | None
    path: Path
    _found: profile | None = field(default=None, init=False)
    _recording: ExitStack = field(default_factory=ExitStack, init=False)

    def begin(self, step: int) -> None:
        """Start recording if `step` is the chosen one. Call it before the forward."""
        if step == self.step:
            self._found = self._recording.enter_context(traced())

    def end(self) -> None:
        """Write the trace file if this step was recorded. Call it after the step."""
        if self._found is None:
            return
        self._recording.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with writing_new(self.path) as path:
            self._found.export_chrome_trace(str(path))
        self._found = None
