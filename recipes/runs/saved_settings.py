"""Save the settings of a job for its owner only. Imports no torch."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from lightning_cp.files import PRIVATE, writing, writing_new
from lightning_cp.launch.rank import is_first, launcher_env
from lightning_cp.recipes.terminal import print_error

FOLDER = ".hydra"  # in the folder of a run
_FAILED_EXIT_CODE = 1


class SaveSettings(Callback):
    """Hydra callback that writes the files that Hydra writes with `hydra.output_subdir=.hydra`.

    They repeat the user's settings and can contain passwords. Hydra would create them readable by everyone, and on all
    ranks that another launcher starts. Here, the first rank creates them readable by their owner only.
    """

    @override
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        multirun = Path(config.hydra.sweep.dir) / "multirun.yaml"
        _as_first_rank(lambda: _write(multirun, config))  # Hydra overwrites it, and keeps its mode

    @override
    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        settings = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        hydra = OmegaConf.masked_copy(config, "hydra")
        _as_first_rank(lambda: save_settings(Path(config.hydra.runtime.output_dir), settings, hydra))


def save_settings(run_dir: Path, config: DictConfig, hydra: Any) -> None:
    """Write config.yaml, hydra.yaml and overrides.yaml, with interpolations, readable by their owner only.

    Args: run_dir: folder of a run; the files are in its folder `.hydra`. hydra: Hydra's own settings, under "hydra".
    Raises: OSError: a file cannot be written; names it.
    """
    folder = run_dir / FOLDER
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, values in {"config": config, "hydra": hydra, "overrides": hydra.hydra.overrides.task}.items():
        _write(folder / f"{name}.yaml", values)


def _as_first_rank(write: Callable[[], object]) -> None:
    """Call a function on the first rank. If the disk is full, print one line and exit."""
    if not is_first(launcher_env(os.environ)):
        return
    try:
        write()
    except OSError as error:
        print_error(error)
        raise SystemExit(_FAILED_EXIT_CODE) from None


def _write(path: Path, values: Any) -> None:
    with writing_new(path, mode=PRIVATE):
        path.write_text(OmegaConf.to_yaml(values), encoding="utf-8")
