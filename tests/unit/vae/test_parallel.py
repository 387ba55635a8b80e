"""The table of autoencoders holds in the installed diffusers."""

from __future__ import annotations

import diffusers
import pytest

from lightning_cp.vae.parallel import CLASSES


@pytest.mark.parametrize("name", CLASSES)
def test_the_loops_over_tiles_are_those_of_the_installed_diffusers(name: str) -> None:
    methods = {method for method in dir(getattr(diffusers, name)) if "tiled_" in method}
    assert {method for method in methods if method.endswith(("encode", "decode"))} == set(CLASSES[name].loops)
