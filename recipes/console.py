"""The console command `lightning-cp COMMAND setting=value …`: the recipes of an installed package."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version

from lightning_cp.compat.versions import missing_package

COMMANDS = {
    "train": "train a small transformer on digits, or fine-tune a pretrained one",
    "sample": "sample from a checkpoint of train, or with a diffusers pipeline",
    "convert": "convert .tar and .parquet archives to a folder of media",
    "precompute": "encode pictures, clips and captions once, into a latent cache",
    "plan": "plan the degrees: which layouts fit, how long a step takes, and what bounds it",
    "check": "check a plan: run a model alone and in every mode",
    "check-family": "check that a family feeds its transformer as the pipeline does",
    "doctor": "show this machine's devices and kernels, and test every mode",
    "bench": "in a clone of the repository: measure attention, a training step and sampling",
    "compare": "compare the exactness of diffusers' context parallelism and of ours",
}


def main() -> int | None:
    """Run the command that the first argument names. Returns: the exit code; None: 0."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        sys.argv = [f"lightning-cp {name}", *sys.argv[2:]]
        try:
            command = import_module(f"lightning_cp.recipes.{name.replace('-', '_')}")
        except ImportError as error:
            if (message := missing_package(error, f"lightning-cp {name}")) is None:
                raise
            print(f"error: {message}", file=sys.stderr)
            return 2
        code: int | float | None = command.main()
        return code if isinstance(code, int) else None  # in a sweep, train returns a loss
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: lightning-cp COMMAND [setting=value …]; `lightning-cp COMMAND --help` lists its settings\n")
        print("\n".join(f"  {name:{width}}  {what}" for name, what in COMMANDS.items()))
        print("\n`lightning-cp --version` prints the version.")
        return 0
    if name in ("-V", "--version"):
        print(f"lightning-cp {version('lightning-cp')}")
        return 0
    close = get_close_matches(name, [*COMMANDS, "--help", "--version"], 1)
    meant = f"did you mean {close[0]}? All are" if close else "use one of"
    print(f"error: {name!r} is no command of lightning-cp: {meant} {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
