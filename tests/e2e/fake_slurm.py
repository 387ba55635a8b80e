"""Imitate the SLURM commands that a job needs: sbatch runs the elements of an array one after another on this machine.

`install` writes them into a folder for PATH. Each call is noted in `calls`, each script kept as `script_<n>.sh`.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("sbatch", "srun", "sacct", "scontrol", "scancel")
ARRAY = 40  # id of the first array


def install(folder: Path) -> Path:
    """Returns: the folder for PATH."""
    folder.mkdir()
    for command in COMMANDS:
        path = folder / command
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {command} "$@"\n')
        path.chmod(0o755)
    return folder


def options(script: Path) -> dict[str, str]:
    """Options of a script for SLURM."""
    lines = [line.removeprefix("#SBATCH --") for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    return {name: value.strip("'\"") for name, _, value in (line.partition("=") for line in lines)}


def _sbatch(folder: Path, arguments: list[str]) -> None:
    array = ARRAY + len(list(folder.glob("script_*")))
    script = folder / f"script_{array}.sh"
    script.write_text(Path(arguments[-1]).read_text())
    print(f"Submitted batch job {array}", flush=True)
    subprocess.Popen(
        [sys.executable, __file__, "run_array", str(script)],
        stdin=subprocess.DEVNULL,
        stdout=(folder / "array.log").open("a"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _run_array(folder: Path, arguments: list[str]) -> None:
    script = Path(arguments[0])
    array, asked = script.stem.removeprefix("script_"), options(script)
    nodes, tasks = int(asked["nodes"]), int(asked["ntasks-per-node"])
    last = int(asked["array"].partition("%")[0].partition("-")[2])
    time.sleep(1)  # submitit puts what is to run in its place once it knows the job's id
    for element in range(last + 1):
        job = {
            "SLURM_JOB_ID": f"{int(array) * 100 + element}",
            "SLURM_ARRAY_JOB_ID": array,
            "SLURM_ARRAY_TASK_ID": str(element),
            "SLURM_JOB_NAME": asked["job-name"],
            "SLURM_NTASKS": str(nodes * tasks),
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_NNODES": str(nodes),
            "SLURM_NODELIST": "localhost",
            "SLURM_JOB_NODELIST": "localhost",
        }
        subprocess.run(["sh", str(script)], env={**os.environ, **job}, check=False)
        (folder / "ended").open("a").write(f"{array}_{element}\n")


def _srun(_: Path, arguments: list[str]) -> None:
    while arguments[0].startswith("-"):
        arguments = arguments[1 if arguments[0] == "--unbuffered" else 2 :]
    tasks = int(os.environ["SLURM_NTASKS"])
    nodes = int(os.environ["SLURM_NNODES"])
    ranks = [
        subprocess.Popen(
            arguments,
            env={
                **os.environ,
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank % (tasks // nodes)),
                "SLURM_NODEID": str(rank // (tasks // nodes)),
            },
        )
        for rank in range(tasks)
    ]
    sys.exit(max(abs(rank.wait()) for rank in ranks))


def _sacct(folder: Path, _: list[str]) -> None:
    print("JobID|State|NodeList")
    ended = folder / "ended"
    for job in ended.read_text().split() if ended.exists() else []:
        print(f"{job}|COMPLETED|localhost")


def main(command: str, arguments: list[str]) -> None:
    folder = Path(os.environ["FAKE_SLURM"])
    with (folder / "calls").open("a") as calls:
        calls.write(" ".join([command, *arguments]) + "\n")
    runs = {"sbatch": _sbatch, "run_array": _run_array, "srun": _srun, "sacct": _sacct}
    if command in runs:
        runs[command](folder, arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
