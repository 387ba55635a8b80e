"""Train the first steps of a run again in one process, and write how the losses compare: `certify=true`."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.app.card_sections import add_section
from lightning_cp.app.metrics import read_metric_rows
from lightning_cp.app.runs import sweep
from lightning_cp.checkpoint.folder import atomic_file
from lightning_cp.compat.versions import installed_version
from lightning_cp.files import PRIVATE, writing_new
from lightning_cp.launch.job import Failure, FailureKind, Job, Result
from lightning_cp.launch.local import LocalLauncher

STEPS = 20
FILE, FOLDER = "certificate.json", "one_process"  # in the run's folder; the second one is removed
_LIMITS = {"32-true": 1e-4, "64-true": 1e-4}
_HALF_LIMIT = 2e-2  # relative, for precisions with bfloat16 or float16
_PACKAGES = ("lightning-cp", "torch", "diffusers", "lightning", "peft")


@dataclass(frozen=True)
class Certificate:
    """Losses of the first steps of a run, on its topology and on one process.

    Attributes:
        topology: degrees of the run, by name.
        steps: step numbers.
        losses, one_process: losses of these steps.
        largest_difference: largest |difference| / |loss of one process|.
        limit: largest accepted difference.
        precision: Lightning's precision.
        versions: versions of packages, by name.
    """

    topology: dict[str, int]
    steps: list[int]
    losses: list[float]
    one_process: list[float]
    largest_difference: float
    limit: float
    precision: str
    versions: dict[str, str | None]

    @property
    def holds(self) -> bool:
        """True if all losses are equal up to the limit."""
        return self.largest_difference <= self.limit

    def lines(self) -> list[str]:
        """Return the certificate as Markdown."""
        degrees = " × ".join(f"{name} {degree}" for name, degree in self.topology.items())
        verdict = "equal" if self.holds else "NOT equal"
        return [
            f"The losses of the first {len(self.steps)} steps on {degrees} and on one process are {verdict}: the "
            f"largest relative difference is {self.largest_difference:.1e}, the limit {self.limit:.0e} "
            f"(precision {self.precision}).",
            "",
            "| step | this run | one process |",
            "|---|---|---|",
            *(
                f"| {step} | {here:.8g} | {alone:.8g} |"
                for step, here, alone in zip(self.steps, self.losses, self.one_process, strict=True)
            ),
        ]


def compare(config: DictConfig, here: Path, alone: Path) -> Certificate:
    """Compare the first losses of two runs. Args: here, alone: their metrics.csv.

    Raises: ValueError: a file is damaged, or they have no common steps.
    """
    losses = [{int(row["step"]): row["loss"] for row in read_metric_rows(path)} for path in (here, alone)]
    steps = sorted(losses[0].keys() & losses[1].keys())[:STEPS]
    if not steps:
        raise ValueError(f"{here} and {alone} have no common steps")
    ours, theirs = ([losses_of_run[step] for step in steps] for losses_of_run in losses)
    differences = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True)]
    largest = next((x for x in differences if x != x), max(differences))  # nan must not be lost
    return Certificate(
        {"data": config.data_parallel, "ring": config.ring, "ulysses": config.ulysses},
        steps,
        ours,
        theirs,
        largest,
        _LIMITS.get(str(config.precision), _HALF_LIMIT),
        str(config.precision),
        {package: installed_version(package) for package in _PACKAGES},
    )


def one_process_config(config: DictConfig, resolved: DictConfig) -> DictConfig:
    """Return the configuration of the first steps of the same run on one process: no pictures, exports or loggers.

    Args:
        config: configuration of the run, with interpolations.
        resolved: the same, resolved.
    """
    alone = config.copy()
    folder = Path(resolved.run_dir)
    OmegaConf.set_struct(alone, False)
    alone.strategy = {"_target_": "builtins.str", "object": "auto"}
    for name in ("ring", "ulysses", "data_parallel", "devices", "num_nodes"):
        alone[name] = 1
    steps = min(STEPS, resolved.max_steps)
    alone.update({"certify": False, "resume": None, "kernel": "auto", "progress": False, "trace_step": None})
    alone.lr_steps = resolved.lr_steps or resolved.max_steps
    alone.update({"max_steps": steps, "checkpoint_every": steps, "export": False, "run_dir": str(folder / FOLDER)})
    if "micro_batch_size" in alone:
        share = resolved.batch_size // resolved.data_parallel
        alone.micro_batch_size = min(resolved.micro_batch_size or share, share)
    alone.update({name: None for name in ("logger", "shares", "save_every") if name in alone})
    alone.sampling.every = None
    if "prompts" in alone.sampling:
        alone.sampling.prompts = None
    if resolved.data.get("kind") == "folder":  # the run has encoded it
        alone.data.update({"kind": "latents", "path": str(folder / "latents")})
    if resolved.get("validation") is not None and resolved.validation.every is not None:
        alone.validation.every = steps
    return alone


def certify(config: DictConfig, resolved: DictConfig, job: Job, check: Callable[[DictConfig], Any]) -> Result:
    """Run the first steps on one process, after the run, and write the certificate into the run's folder.

    It is also added to the model card. Returns: a failure if the one process failed, or the losses differ.

    Args:
        config: configuration of the run, with interpolations.
        resolved: the same, resolved.
        job: job of the run.
        check: checks and resolves the configuration of the one process.
    """
    folder = Path(resolved.run_dir)
    alone: DictConfig = check(one_process_config(config, resolved)).config
    hydra = folder / FOLDER / ".hydra"
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    hydra.mkdir(parents=True)
    with writing_new(hydra / sweep.RESOLVED, mode=PRIVATE) as path:
        OmegaConf.save(alone, path)
    print(f"certify: training {alone.max_steps} steps on one process", flush=True)
    result = LocalLauncher().launch(
        replace(job, config=hydra / sweep.RESOLVED, world_size=1, log_dir=folder / FOLDER / "logs", threads=0)
    )
    if result.failure is not None:
        _keep_logs(folder / FOLDER)
        reason = f"certify: one process could not train the first steps: {result.failure.message}. The run is complete"
        return replace(result, failure=replace(result.failure, message=reason))
    certificate = compare(resolved, folder / "metrics.csv", folder / FOLDER / "metrics.csv")
    write(certificate, folder)
    shutil.rmtree(folder / FOLDER)  # resume=last and lora=last must not find its files
    if certificate.holds:
        print(f"certify: {certificate.lines()[0]}", flush=True)
        return result
    return Result(Failure(0, FailureKind.REFUSED, f"certify: {certificate.lines()[0]} See {folder / FILE}"))


def write(certificate: Certificate, folder: Path) -> None:
    """Write `certificate.json`, and add the certificate to the model cards in the run's folder."""
    with atomic_file(folder / FILE, mode=PRIVATE) as scratch:
        scratch.write_text(json.dumps({**asdict(certificate), "holds": certificate.holds}, indent=1) + "\n")
    for card in folder.glob("*/README.md"):
        add_section(card, "Certificate", certificate.lines())


def _keep_logs(folder: Path) -> None:
    """Remove everything but the logs of a run."""
    for path in folder.iterdir():
        if path.name != "logs" and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file():
            path.unlink()
