"""What a user reads about unused parameters when the strategy, not the user, lets DDP look for them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.e2e.recipe import ROOT
from tests.harness import warm

_ADVICE = "did not find any unused parameters"


@pytest.mark.full
def test_ddps_advice_on_a_setting_reaches_only_who_has_set_it(tmp_path: Path) -> None:
    script = Path(__file__).with_name("first_block.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = warm.run([sys.executable, str(script)], env=environment, cwd=tmp_path, timeout=120)
    assert ran.returncode == 0, ran.stderr
    set_up, _, rest = ran.stderr.partition("trained: set-up")
    later, _, user = rest.partition("trained: later")
    assert "trained: user" in user
    assert _ADVICE not in set_up
    assert _ADVICE not in later
    assert _ADVICE in user
