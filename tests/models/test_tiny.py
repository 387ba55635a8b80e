"""The tiny models themselves."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from tests.models import TINY


@pytest.mark.parametrize("name", ["nucleus_moe", "lumina_next"])
def test_weights_do_not_depend_on_what_memory_held(name: str) -> None:
    """These classes leave parameters uninitialised, and `build` draws numbers for parameters that are zero."""
    with patch("torch.empty", torch.zeros):
        expected = TINY[name].build().state_dict()
    torch.use_deterministic_algorithms(True)  # torch.empty returns NaN
    try:
        found = TINY[name].build().state_dict()
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        assert torch.equal(found[key], weight), key
