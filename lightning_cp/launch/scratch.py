"""Create temporary folders for launchers, and remove those of killed launchers."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_cp.checkpoint.folder_lock import lock_new_folder, remove_abandoned
from lightning_cp.locks import unlock

_PREFIX = "lightning_cp_run_"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a temporary folder, and remove leftovers of this user's killed launchers."""
    remove_abandoned(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"))
    folder, lock = lock_new_folder(lambda: Path(tempfile.mkdtemp(prefix=_PREFIX)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        unlock(lock)
