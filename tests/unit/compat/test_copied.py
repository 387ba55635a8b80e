"""The original of each copied function is the tested one; a changed original is an error."""

from __future__ import annotations

import pytest
from lightning.pytorch.strategies.model_parallel import ModelParallelStrategy

from lightning_cp.compat.copied import TRAINER_SETUP, Copied, check_unchanged, source_digest
from lightning_cp.compat.versions import IncompatibleVersionError


def test_the_original_of_the_trainers_setup_is_the_tested_one() -> None:
    check_unchanged(ModelParallelStrategy.setup, TRAINER_SETUP)
    assert source_digest(ModelParallelStrategy.setup) == TRAINER_SETUP.digest, (
        "Lightning's ModelParallelStrategy.setup has changed: compare ContextParallelFSDPStrategy.setup with it, then "
        "update TRAINER_SETUP"
    )


def test_another_parameter_is_an_error() -> None:
    def setup(self: object, trainer: object, fresh: object) -> None: ...

    with pytest.raises(IncompatibleVersionError, match=r"setup takes \('self', 'trainer', 'fresh'\)"):
        check_unchanged(_of_lightning(setup), Copied(("self", "trainer"), frozenset(), ""))


def test_another_step_is_an_error() -> None:
    def setup(self: object, trainer: object) -> None:
        trainer.a_new_step()  # type: ignore[attr-defined]

    copied = Copied(("self", "trainer"), frozenset({"an_old_step"}), "")
    with pytest.raises(IncompatibleVersionError, match="has changed in a_new_step, an_old_step"):
        check_unchanged(_of_lightning(setup), copied)


def _of_lightning(function: object) -> object:
    function.__module__ = "lightning.pytorch.strategies.model_parallel"
    return function
