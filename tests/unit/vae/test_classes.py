"""The table of autoencoders holds in the installed diffusers."""

from __future__ import annotations

import diffusers
import pytest
from torch import nn

from lightning_cp.compat.versions import IncompatibleVersionError
from lightning_cp.vae.classes import CLASSES, vae_class_of


@pytest.mark.parametrize("name", CLASSES)
def test_the_loops_over_tiles_are_those_of_the_installed_diffusers(name: str) -> None:
    methods = {method for method in dir(getattr(diffusers, name)) if "tiled_" in method}
    assert {method for method in methods if method.endswith(("encode", "decode"))} == set(CLASSES[name].loops)


def test_a_renamed_loop_is_an_error() -> None:
    class AutoencoderKLWan(nn.Module):
        def tiled_encode(self) -> None: ...

        def spatially_tiled_decode(self) -> None: ...

    with pytest.raises(IncompatibleVersionError, match="over tiles: spatially_tiled_decode, tiled_decode"):
        vae_class_of(AutoencoderKLWan())
