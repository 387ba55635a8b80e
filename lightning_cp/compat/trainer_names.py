"""Private names of `lightning.pytorch`."""

from __future__ import annotations

from lightning_cp.compat.versions import private_names

with private_names("lightning"):
    from lightning.pytorch.strategies.launchers.multiprocessing import (
        _MultiProcessingLauncher as MultiProcessingLauncher,
    )
    from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput as WorkerOutput
    from lightning.pytorch.strategies.launchers.subprocess_script import (
        _SubprocessScriptLauncher as SubprocessScriptLauncher,
    )

__all__ = ["MultiProcessingLauncher", "SubprocessScriptLauncher", "WorkerOutput"]
