"""Write the results as a Markdown page with plots."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from lightning_cp.app.benchmark.gpu.results import ResultTable, StageResult
from lightning_cp.app.benchmark.plots import draw_workload
from lightning_cp.app.benchmark.report import ResultRow
from lightning_cp.app.timing import machine_name
from lightning_cp.files import writing_new

_ABOUT = {
    "tests": "The tests in `tests/gpu`: every CUDA kernel against float64; a step without host synchronisation,"
    " captured in a CUDA graph and compiled with `fullgraph=True`; several gloo ranks that share the GPU; float16 with"
    " a gradient scaler.",
    "errors": "Every kernel against softmax attention in float64.",
    "merge": "Bandwidth of the Triton kernel that merges two partial results, relative to a plain copy.",
    "one_rank": "Time of the computation of one rank in each mode, with collectives that send nothing, relative to one"
    " attention call with the same FLOPs. A ratio above 1 is our overhead: merges, sums, packing, and kernels on"
    " smaller chunks.",
    "memory": "Peak allocation of attention on one rank, relative to the sum of the buffers that exist at the same time"
    " and the workspace of one kernel call.",
    "sparse": "Attention with sparse masks: time relative to attention without a mask, times the share of the pairs of"
    " queries and keys that the mask lets attend. One rank of several computes its queries over all keys.",
    "host": "CPU time of the thread that calls attention, per call: tiny tensors, and collectives that send nothing. It"
    " limits the speed where a device computes faster than its host launches.",
    "transformer": "A step of a transformer of the size of FLUX.1 on one rank, compared with diffusers' context"
    " parallelism: time until the device is done, and CPU time of the thread that launches. Where both are equal, the"
    " host limits the speed. Collectives send nothing.",
    "long_context": "The ring's work on one rank for long sequences, forward and backward, with its peak memory: what a"
    " step allocates in addition to q, k, v and the gradient of the output. Collectives send nothing.",
    "main_job": "Losses of `lightning-cp train` on one GPU, compared with those on CPU.",
}


def write_page(results: dict[str, StageResult], stages: Sequence[str], folder: Path, *, device: str) -> list[Path]:
    """Write `gpu.md` and its plots into `folder`. Returns: their paths.

    Args:
        results: results by stage; missing stages are listed as not run.
        stages: all stages, in order.
        device: "cuda", or "cpu" for a rehearsal.
    """
    plots = _plots(results, folder)
    checks = [(name, check) for name, result in results.items() for check in result.checks]
    failed = [(name, check) for name, check in checks if check.passed is False]
    met = sum(check.passed is True for _, check in checks)
    lines = ["# One GPU", ""]
    lines += [f"Measured on {_machine()} with", "", "    lightning-cp bench bench=gpu", ""]
    if device == "cpu":
        lines += ["**A rehearsal on CPU with small sizes: these numbers do not apply to a GPU.**", ""]
    lines += [f"{met} goals met, {len(failed)} missed.", ""]
    lines += _table(["stage", "result", "seconds"], [_summary(name, results.get(name)) for name in stages])
    if failed:
        lines += ["", "## Goals missed", ""]
        lines += _table(["stage", "check", "value", "goal"], [[n, c.name, c.value, c.goal] for n, c in failed])
    for name, result in results.items():
        lines += ["", f"## Stage `{name}`", "", _ABOUT.get(name, ""), ""]
        lines += [f"![{path.stem}]({path.name})" for path in plots.get(name, [])]
        for table in [*_ratio_tables(result), *result.tables]:
            lines += ["", f"### {table.title}", "", *_table(table.columns, table.rows)]
    with writing_new(folder / "gpu.md") as page:
        page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [page, *(path for paths in plots.values() for path in paths)]


def _summary(name: str, result: StageResult | None) -> list[str]:
    if result is None:
        return [name, "not run", ""]
    missed = sum(check.passed is False for check in result.checks)
    has_goals = any(check.passed is not None for check in result.checks)
    text = result.error or (f"{missed} goals missed" if missed else "all goals met" if has_goals else "no goals")
    return [name, text.replace("|", "/").replace("\n", " ")[:300], f"{result.seconds:.0f}"]


def _ratio_tables(result: StageResult) -> Iterable[ResultTable]:
    """Yield the checks of a stage with rows for `bench.csv` as one table."""
    if result.rows:
        yield ResultTable("Ratios", ["case", "ratio", "goal"], [[c.name, c.value, c.goal] for c in result.checks])


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]


def _plots(results: dict[str, StageResult], folder: Path) -> dict[str, list[Path]]:
    """Draw the plots. Returns: their paths by stage."""
    plots: dict[str, list[Path]] = {}
    ratios = results.get("one_rank")
    if ratios is not None and ratios.rows:
        for workload in dict.fromkeys(row["workload"] for row in ratios.rows):
            path = folder / f"gpu_{workload.replace(' ', '_')}.png"
            draw_workload([cast(ResultRow, row) for row in ratios.rows if row["workload"] == workload], path)
            plots.setdefault("one_rank", []).append(path)
    memory = results.get("memory")
    if memory is not None and memory.tables:
        plots["memory"] = [folder / "gpu_memory.png"]
        _draw_memory(memory.tables[0], plots["memory"][0])
    return plots


def _draw_memory(table: ResultTable, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.5 * len(table.rows) + 1.4), layout="constrained")
    axis: Any = figure.subplots()
    labels = [f"{row[0]}, {row[1]}" for row in table.rows]
    measured, expected = ([float(row[i].replace(",", "") or 0) for row in table.rows] for i in (2, 4))
    at = range(len(labels))
    axis.barh([y + 0.2 for y in at], measured, height=0.4, label="measured")
    axis.barh([y - 0.2 for y in at], expected, height=0.4, label="formula", color="lightgray")
    axis.set_yticks(list(at), labels)
    axis.invert_yaxis()
    axis.set(xlabel="peak MB", title=table.title)
    axis.legend(frameon=False)
    with writing_new(path):
        figure.savefig(path, dpi=110)


def _machine() -> str:
    import diffusers
    import torch

    versions = f"diffusers {diffusers.__version__}, Python {platform.python_version()}"
    if torch.cuda.is_available():
        versions += f", CUDA {torch.version.cuda}"
    return f"{machine_name()}, {versions}"
