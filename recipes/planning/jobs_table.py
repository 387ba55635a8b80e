"""Print the choices of a multirun's plans in one table. Imports no torch: Hydra creates it before each command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.table import Table
from typing_extensions import override

from lightning_cp.recipes import terminal
from lightning_cp.recipes.terminal import rich_text


class JobsTable(Callback):
    """Hydra callback: after the last job, a row for each plan.json of the multirun, in the order of the jobs."""

    @override
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        shown = Table(title="choices", title_justify="left")
        for column in ("model", "task", "device", "ranks", "choice", "GB", "ms / sample", "bound"):
            shown.add_column(column, justify="right" if column in ("ranks", "GB", "ms / sample") else "left")
        files = Path(config.hydra.sweep.dir).glob("*/plan.json")
        for file in sorted(files, key=lambda x: (len(x.parent.name), x.parent.name)):
            shown.add_row(*map(rich_text, _row(json.loads(file.read_text(encoding="utf-8")))))
        terminal.console(width=150).print(shown)


def _row(plan: dict[str, Any]) -> list[str]:
    asked = [plan["model"], plan["task"], plan["device"]["name"], str(plan["ranks"])]
    if not plan["choices"]:
        return [*asked, "nothing fits", "", "", ""]
    best = plan["choices"][0]
    memory = sum(best["peak_bytes"].values()) / 1e9 + plan["reserved_gb"] + sum(plan["others_gb"].values())
    choice = " ".join(x for x in plan["overrides"] if not x.endswith("=1") and not x.endswith("=none"))
    return [*asked, choice, f"{memory:.1f}", f"{1e3 * best['sample_s']:.3g}", best["bound"]]
