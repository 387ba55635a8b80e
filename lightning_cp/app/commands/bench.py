"""Measure attention, a training step and sampling: in one process, in every mode of lightning_cp, and in diffusers'.

Also measure how long training waits for a latent cache, and how many samples a second precompute encodes.

    lightning-cp bench
    lightning-cp bench bench=quick

Writes bench.csv, a picture per workload and a trace per subject to the run directory. `--help` lists the
settings.
"""

import json
import os
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lightning_cp.app.runs.command import command
from lightning_cp.app.settings.target import reads_settings
from lightning_cp.checkpoint.folder import temporary_folder
from lightning_cp.files import writing_new
from lightning_cp.launch import Job, LocalLauncher, Machine
from lightning_cp.launch.rendezvous import init_process_group

WORKLOADS = ("attention", "one_rank", "training", "sampling", "sparse", "data")
ATTENTION_WORKLOADS = ("attention", "one_rank")
ONE_PROCESS = ("one_rank", "data")
DATA_MODEL = "diffusers.WanTransformer3DModel"  # the workload `data` has encoders for it


@reads_settings
def measure_all(config: DictConfig) -> None:
    """Measure on every rank; rank 0 writes a row per subject."""
    import warnings

    import diffusers
    import torch
    import torch.distributed as dist

    from lightning_cp.app.benchmark import workloads
    from lightning_cp.app.benchmark.measure import measure_subjects
    from lightning_cp.app.benchmark.report import rows_of
    from lightning_cp.app.benchmark.sparse import sparse

    warnings.filterwarnings("ignore")  # from other packages
    diffusers.logging.set_verbosity_error()
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = (
        torch.device(config.device, torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
    )
    if config.simulated_ranks:
        from lightning_cp.compat.torch_names import fake_store

        dist.init_process_group("fake", store=fake_store(), rank=0, world_size=config.simulated_ranks)
    else:
        init_process_group("nccl" if device.type == "cuda" else "gloo")
    world = dist.get_world_size()
    if list(config.workloads) == ["data"]:
        from lightning_cp.app.benchmark.data import measure_data
        from lightning_cp.app.benchmark.data_rows import data_rows

        rows = data_rows(config.tokens, measure_data(config, device))
        Path(config.result).write_text(json.dumps(rows) + "\n", encoding="utf-8")
    sets: list[tuple[str, int, Callable[[], Any]]] = []
    for name in (x for x in WORKLOADS if x in config.workloads and x != "data"):
        work: Any = sparse if name == "sparse" else getattr(workloads, name)
        if name in ATTENTION_WORKLOADS:
            sets += [(name, n, partial(work, config.attention, n, device)) for n in config.attention.lengths]
        else:
            section = config.sparse if name == "sparse" else config
            sets.append((name, section.tokens, partial(work, section, device)))
    for name, length, subjects_of in sets:
        subjects = [x for x in subjects_of() if config.peers or not x.is_peer]
        traces = Path(config.folder) / "traces" / f"{name}_{length}_{world}"
        figures = measure_subjects(
            subjects, repeats=config.repeats, seconds=config.seconds, device=device, traces=traces
        )
        if dist.get_rank() == 0:
            with Path(config.result).open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows_of(name, length, world, figures)) + "\n")
    dist.destroy_process_group()


def check_benchmark(config: DictConfig) -> str:
    """Describe what is wrong with the settings; "" if nothing is."""
    if "stages" in config:
        from lightning_cp.app.benchmark.gpu.run import check_settings

        return check_settings(config)
    if "long_clips" in config:
        from lightning_cp.app.benchmark.long_clips.run import check_long_clips

        return check_long_clips(config)
    unknown = [x for x in config.workloads if x not in WORKLOADS]
    if unknown or not config.workloads:
        return f"workloads={list(config.workloads)} is not valid: must be some of {', '.join(WORKLOADS)}"
    for name, minimum in (("ranks", 2), ("attention.lengths", 1)):
        values = OmegaConf.select(config, name)
        if not values or not all(isinstance(x, int) and x >= minimum for x in values):
            return f"{name}={list(values or [])}: must be integers of at least {minimum}"
    if config.device not in ("cpu", "cuda"):
        return f"device={config.device} is not valid: must be cpu or cuda"
    gpus = Machine.this().gpus
    needed = max(config.ranks) if _real_workloads(config) else 1
    if config.device == "cuda" and needed > gpus:
        return f"ranks={list(config.ranks)}: but there are {gpus} GPUs here; use device=cpu, or bench=cpu"
    model_workloads = [x for x in config.workloads if x not in (*ATTENTION_WORKLOADS, "sparse")]
    if model_workloads and "model" not in config:
        return f"workloads={list(config.workloads)}: these settings have no model; use bench=cpu or bench=four_gpus"
    if "sparse" in config.workloads:
        sizes = (config.sparse.tokens, config.sparse.frame, *config.sparse.blocks) if "sparse" in config else ()
        if not sizes or not all(isinstance(x, int) and x >= 8 for x in sizes):
            return (
                f"workloads={list(config.workloads)}: sparse needs settings with a section sparse, as in bench=cpu, in "
                f"which tokens, frame and blocks are integers of at least 8; got {list(sizes)}"
            )
    if "data" in config.workloads and ("data" not in config or config.model["_target_"] != DATA_MODEL):
        return (
            f"workloads={list(config.workloads)}: data needs settings with a {DATA_MODEL} and a section data, as in "
            "bench=cpu; leave data out, or use those"
        )
    return ""


def _real_workloads(config: DictConfig) -> list[str]:
    """Return the workloads that run on all ranks; `one_rank` has a simulated world, and `data` one process."""
    return [x for x in config.workloads if x not in ONE_PROCESS]


@command("bench", "bench")
def main(config: DictConfig) -> None:
    """Measure with each number of ranks in turn and show the results."""
    from lightning_cp.app.benchmark.plots import draw_data, draw_workload
    from lightning_cp.app.benchmark.report import markdown_page, tables, terminal_table, write_csv
    from lightning_cp.app.timing import machine_name

    problem = check_benchmark(config)
    if problem:
        sys.exit(f"error: {problem}")
    console, folder = Console(width=None if sys.stdout.isatty() else 140), Path(HydraConfig.get().runtime.output_dir)
    if "stages" in config:
        from lightning_cp.app.benchmark.gpu.run import run

        run(config, folder)
        return
    if "long_clips" in config:
        from lightning_cp.app.benchmark.long_clips.run import run_long_clips

        run_long_clips(config, folder)
        return
    rows = []
    jobs = [(1, 0, ["sparse"])] if "sparse" in config.workloads else []
    jobs += [(ranks, 0, _real_workloads(config)) for ranks in config.ranks if _real_workloads(config)]
    jobs += [(1, ranks, ["one_rank"]) for ranks in config.ranks if "one_rank" in config.workloads]
    jobs += [(1, 0, ["data"])] if "data" in config.workloads else []
    for ranks, simulated_ranks, workloads in jobs:
        with temporary_folder() as scratch:
            result, settings = scratch / "rows.jsonl", scratch / "settings.yaml"
            values = {
                "workloads": workloads,
                "simulated_ranks": simulated_ranks,
                "result": str(result),
                "folder": str(folder),
            }
            OmegaConf.save({**config, **values}, settings, resolve=True)
            threads = 1 if config.device == "cpu" else 0
            target, quiet = f"{__name__}:measure_all", {"KINETO_LOG_LEVEL": "6"}
            job = Job(target, settings, ranks, folder / "logs", threads=threads, environment=quiet)
            outcome = LocalLauncher(limit_s=config.limit_s).launch(job)
            if outcome.failure is not None:
                print(f"error: {outcome.failure.describe()}", file=sys.stderr)
                sys.exit(outcome.exit_code)
            sets = [json.loads(line) for line in result.read_text(encoding="utf-8").splitlines()]
        for rows_of_set in sets:
            rows += rows_of_set
            for title, cells in tables(rows_of_set):
                console.print(terminal_table(title, cells))
    write_csv(rows, folder / "bench.csv")
    drawn = [
        folder / f"bench_{name}.png"
        for name in dict.fromkeys(row["workload"] for row in rows if row["workload"] != "sparse")
    ]
    for path in drawn:
        plot = draw_data if path.stem == "bench_data" else draw_workload
        plot([row for row in rows if f"bench_{row['workload']}.png" == path.name], path)
    if config.page is not None:
        page = Path(config.page)
        page.parent.mkdir(parents=True, exist_ok=True)
        pictures = [path.name.replace("bench", page.stem, 1) for path in drawn]
        for path, name in zip(drawn, pictures, strict=True):
            with writing_new(page.with_name(name)) as copy:
                copy.write_bytes(path.read_bytes())
        overrides = [x for x in HydraConfig.get().overrides.task if not x.startswith("page=")]
        command = shlex.join(["lightning-cp", "bench", *overrides])
        with writing_new(page):
            page.write_text(markdown_page(rows, machine=machine_name(), command=command, pictures=pictures), "utf-8")
    console.print(f"{folder / 'bench.csv'}, {', '.join(path.name for path in drawn)}")
