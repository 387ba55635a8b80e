"""Imports of a recipe before it answers: `--help` and a refused setting need no heavy package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.cases import and_others

RECIPES = Path(__file__).parents[3] / "recipes"
# Each takes from half a second to several seconds to import. Counted instead of measured: the machine may be busy.
HEAVY = ("torch", "lightning", "diffusers", "transformers", "numpy", "scipy", "sklearn", "matplotlib", "pandas", "PIL")
_RUN = """
import runpy, sys
heavy, sys.argv = sys.argv[1].split(","), sys.argv[2:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as ended:
    code = ended.code or 0
else:
    code = 0
print("imported:", *(name for name in heavy if name in sys.modules))
print("modules:", len(sys.modules))
sys.exit(code)
"""


_STARTS = [
    ("train.py", "--help", 0),
    ("train.py", "ring=0", 2),
    ("sample.py", "ring=0", 2),
    ("precompute.py", "precompute.frames=0 model.pretrained=a/b data.path=.", 2),
    ("bench.py", "--help", 0),
    ("check.py", "--help", 0),
    ("doctor.py", "--help", 0),
]


@pytest.mark.parametrize("starts", and_others(_STARTS))
@pytest.mark.default(1)
def test_help_and_a_refused_setting_import_nothing_heavy(starts: list[tuple[str, str, int]], tmp_path: Path) -> None:
    for recipe, argument, exit_code in starts:
        given = [argument] if argument == "--help" else [*argument.split(), f"hydra.run.dir={tmp_path}/run"]
        command = [sys.executable, "-c", _RUN, ",".join(HEAVY), str(RECIPES / recipe), *given]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
        assert done.returncode == exit_code, done.stderr
        *_, imported, modules = done.stdout.splitlines()
        assert imported == "imported:", recipe
        assert int(modules.split()[1]) < 600, recipe
