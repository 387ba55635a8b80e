"""Our errors are also the built-in errors that callers expect."""

from __future__ import annotations

import pytest

from lightning_cp import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ShapeError, ValueError),
        (errors.PlanError, ValueError),
        (errors.KernelError, ValueError),
        (errors.PeerMismatchError, RuntimeError),
        (errors.InterceptionError, RuntimeError),
    ],
)
def test_an_error_is_caught_as_its_builtin(error: type[Exception], builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="why"):
        raise error("why")
