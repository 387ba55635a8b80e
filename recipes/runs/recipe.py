"""Run a recipe: check the composed configuration, start the ranks, report the result."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_cp.checkpoint import CheckpointError, remove_partials
from lightning_cp.checkpoint.folder import temporary_folder
from lightning_cp.files import PRIVATE, writing_new
from lightning_cp.launch.job import Failure, FailureKind, Job, Launcher, Result
from lightning_cp.launch.local import LocalLauncher
from lightning_cp.launch.machine import Machine
from lightning_cp.launch.rank import ExternalLauncher, LauncherEnv, Target, is_first, launcher_env, target_of
from lightning_cp.recipes.runs import slurm, sweep
from lightning_cp.recipes.runs.auto_degrees import with_degrees
from lightning_cp.recipes.runs.resume import AUTO, identity_of, requeued_checkpoint, resumed_checkpoint
from lightning_cp.recipes.runs.run_folder import check_writable, locked, only_this_rank_failed
from lightning_cp.recipes.runs.saved_settings import save_settings
from lightning_cp.recipes.settings.consistency import check_consistency, check_trainer
from lightning_cp.recipes.settings.finetune import check_groups, is_finetuning
from lightning_cp.recipes.settings.table import SettingsError, check_values, read
from lightning_cp.recipes.settings.world import World, resolve_world
from lightning_cp.recipes.terminal import print_error, printable

_REFUSED_EXIT_CODE = 2
_failed: set[Path] = set()  # sweep folders in which a job failed in this process
_SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True)
class CheckedRun:
    """A valid, resolved configuration and the world it runs on.

    Attributes:
        resumes_requeued: True if SLURM restarted this job, and the run resumes from its checkpoint.
        degrees: why degrees were chosen, with `ring=auto` or `ulysses=auto`; None without.
    """

    config: DictConfig
    world: World
    resumes_requeued: bool = False
    degrees: str | None = None


def check_config(config: DictConfig, machine: Machine, env: LauncherEnv | None) -> CheckedRun:
    """Check everything that can be checked before ranks start, and replace "auto" and "last" by values.

    Raises: SettingsError, CheckpointError: the first error found.
    """
    if is_finetuning(config):
        check_groups(config)
    check_values(config)
    config, degrees = with_degrees(config, machine, env)
    world = resolve_world(config, machine, env)
    check_consistency(config, data_parallel=world.data_parallel, accelerator=world.accelerator)
    requeued = requeued_checkpoint(config)
    resume = resumed_checkpoint(config, requeued)
    with_world = OmegaConf.merge(config, OmegaConf.create({**world.settings(), "resume": resume}))
    resolved = resolve_config(with_world)
    check_trainer(resolved)
    return CheckedRun(resolved, world, resumes_requeued=requeued is not None, degrees=degrees)


Check = Callable[[DictConfig, Machine, LauncherEnv | None], CheckedRun]


def run_recipe(config: DictConfig, target: Target, *, check: Check = check_config) -> float | None:
    """Check the configuration, run the target on all ranks and report errors. Every recipe's `main` calls it.

    In a multirun it records the job and returns the objective, NaN for a job that failed or was skipped.

    Args:
        config: the configuration composed by Hydra.
        target: what every rank calls with the path of the resolved configuration, see `reads_settings`.
        check: checks and resolves the configuration.
    Raises: SystemExit: a single run failed, or a sweep was interrupted.
    """
    env = launcher_env(os.environ)
    if not sweep.in_sweep():
        result = attempt(config, env, target_of(target), check=check)
        if not result.began and not is_first(env):
            result = _after_rank_zero_reported(result, env)
        exit_code = report_result(result, str(config.get("run_dir")))
        if exit_code:
            sys.exit(exit_code)
        return None
    folder, started = sweep.this_sweep(), time.monotonic()
    # Under a launcher, each rank uses its own record of failed jobs: rank 0's files may not be visible to it yet.
    failed_before = sweep.is_sweep_stopped(folder) if env is None else folder in _failed
    if read(config, "sweep.on_error") == "stop" and failed_before:
        return sweep.record_job(config, None, started).objective if is_first(env) else math.nan
    result = attempt(config, env, target_of(target), check=check)
    report_result(result, HydraConfig.get().runtime.output_dir)
    if result.failure is not None:
        _failed.add(folder)
    outcome = sweep.record_job(config, result, started) if is_first(env) else None
    if result.was_stopped or (env is not None and result.failure is not None and result.began):
        if is_first(env):
            sweep.summarise_sweep(folder)  # do not return to Hydra: under a launcher, other ranks may wait forever
        sys.exit(result.exit_code)
    return math.nan if outcome is None else outcome.objective


def attempt(config: DictConfig, env: LauncherEnv | None, target: str, *, check: Check = check_config) -> Result:
    """Check the configuration, then start all ranks here, or run as one rank if a launcher started this process."""
    with ExitStack() as stack:
        try:
            sweep.check_launcher()
            run = check(config, Machine.this(), env)
            run_dir = Path(run.config.run_dir)
            sweep.check_folder(run_dir)
            check_writable(run_dir, "run_dir")
            locks = (stack.enter_context(locked(run_dir, "run_dir")),) if is_first(env) else ()
            if is_first(env):
                slurm.record_run(os.environ, Path(run.config.output_root), identity_of(config), run_dir)
        except (SettingsError, CheckpointError) as error:
            return Result(Failure(-1, FailureKind.REFUSED, str(error), exit_code=_REFUSED_EXIT_CODE), began=False)
        hydra_dir = run_dir / ".hydra"
        if not is_first(env):  # only the first rank writes to the run's folder
            hydra_dir = stack.enter_context(temporary_folder())
        else:
            remove_partials(Path(run.config.output_root))
            if HydraConfig.initialized() and run_dir.resolve() != Path(HydraConfig.get().runtime.output_dir).resolve():
                save_settings(run_dir, config, HydraConfig.instance().cfg)  # run_dir=… was given, not hydra.run.dir
            if run.degrees is not None:
                print(printable(run.degrees), flush=True)
            if run.resumes_requeued:
                print(printable(f"SLURM restarted this job: it resumes from {run.config.resume}"), flush=True)
            elif config.get("resume") == AUTO and run.config.resume is None:
                print(printable(f"resume=auto: no checkpoint of this command under {run.config.output_root} yet"))
        hydra_dir.mkdir(parents=True, exist_ok=True)
        with writing_new(hydra_dir / sweep.RESOLVED, mode=PRIVATE) as resolved:
            OmegaConf.save(run.config, resolved)
        threads = threads_per_rank(run.world, Machine.this())
        job = Job(target, resolved, run.world.size, run_dir / "logs", threads=threads, inherited=locks)
        if is_first(env):
            _forget_encoded(run.config)
        launcher: Launcher = LocalLauncher() if env is None else ExternalLauncher(env)
        result = launcher.launch(job)
        return _requeue_if_timed_out(result) if is_first(env) else result


def _forget_encoded(config: DictConfig) -> None:
    """Rename the mark of an earlier run in this folder that its media are encoded: the ranks wait for a new one."""
    if OmegaConf.select(config, "data.kind") == "folder":
        mark = Path(config.run_dir) / "latents" / "contents.json"
        if mark.exists():
            mark.rename(mark.with_name("previous.json"))


def _after_rank_zero_reported(result: Result, env: LauncherEnv | None) -> Result:
    if env is None or result.failure is None or not only_this_rank_failed():
        return result
    # rank 0, perhaps on another node, may have no error
    message = f"{result.failure.message} (rank {env.rank})"
    return replace(result, failure=replace(result.failure, rank=env.rank, message=message))


def _requeue_if_timed_out(result: Result) -> Result:
    """Requeue a SLURM job that was stopped because its time is up; it then resumes from its checkpoint."""
    failure = result.failure
    if failure is None or not result.was_stopped or failure.exit_code != 128 + signal.SIGUSR1:
        return result
    if not slurm.requeue(os.environ):
        return result
    return replace(result, failure=replace(failure, message=f"{failure.message}; SLURM will restart this job"))


def threads_per_rank(world: World, machine: Machine) -> int:
    """Return the number of CPU threads per rank: the cores of this node divided by its ranks."""
    return max(1, machine.cores // world.devices)


def report_result(result: Result, run_dir: str) -> int:
    """Print why a job failed. Returns: the exit code of the job."""
    failure = result.failure
    if failure is None:
        return 0
    env = launcher_env(os.environ)
    if failure.rank < 0 and not is_first(env):
        return failure.exit_code  # all ranks have the same configuration error; the first rank prints it
    if sys.stdout.isatty():
        sys.stdout.write(_SHOW_CURSOR)  # an interrupted progress bar leaves the cursor hidden
    sys.stdout.flush()
    print_error(failure.describe())
    # Other launchers print or store the output of the ranks themselves.
    if env is None and failure.kind not in (FailureKind.REFUSED, FailureKind.STOPPED):
        print(printable(f"\nlogs of the ranks: {Path(run_dir) / 'logs'}"), file=sys.stderr)
    return failure.exit_code


def resolve_config(config: DictConfig | ListConfig) -> DictConfig:
    """Resolve all interpolations. Raises: SettingsError: a value is missing, or an interpolation cannot be resolved."""
    try:
        resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise SettingsError(" ".join(str(error).split())) from error
    assert isinstance(resolved, DictConfig), "a recipe's configuration is a mapping"
    return resolved
