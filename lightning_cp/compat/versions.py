"""Tested versions of other packages, and the error for a private name that the installed version does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

# Package -> oldest and newest version that the tests were run with. The newest ones are upper bounds in pyproject.toml.
TESTED = {
    "torch": ("2.11.0", "2.14.1"),
    "lightning": ("2.6.0", "2.6.6"),
    "diffusers": ("0.42.1", "0.42.1"),
    "accelerate": ("1.0.0", "1.15.0"),
}


class IncompatibleVersionError(ImportError):
    """The installed version of a package lacks a private name, attribute or method that lightning_cp uses."""


def incompatible(package: str, problem: str) -> IncompatibleVersionError:
    """Return the error for a package that differs from the tested versions.

    Args:
        package: name of the package, a key of `TESTED`.
        problem: full name of the missing or changed object.
    """
    oldest, newest = TESTED[package]
    tested = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
    wanted = f"{package}=={newest}" if oldest == newest else f"{package}>={oldest},<={newest}"
    return IncompatibleVersionError(
        f"{package} {installed_version(package)} does not fit this version of lightning_cp: {problem}. lightning_cp "
        f"uses this private part of {package}, and was tested with {tested}. Install a tested version "
        f"(`pip install '{wanted}'`), or a newer lightning_cp",
        name=package,
    )


def installed_version(package: str) -> str:
    """Return the installed version of a package; "(unknown version)" if it has no metadata."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(unknown version)"


def fsdp_refuses_bytes() -> str | None:
    """Return why FSDP2 cannot shard quantised weights of the dtype uint8; None if it can.

    Before torch 2.12, it lets them require gradients, and converts them to the dtype of `MixedPrecisionPolicy`.
    Source: https://github.com/pytorch/pytorch/pull/177948.
    """
    version = installed_version("torch")
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is None or (int(number[1]), int(number[2])) >= (2, 12):
        return None
    return f"FSDP2 of torch {version} shards only floating-point weights: install torch 2.12 or later"


@contextmanager
def private_names(package: str) -> Iterator[None]:
    """Import private names of a package inside the context.

    Raises:
        IncompatibleVersionError: a name does not exist in the installed version.
        ModuleNotFoundError: the package is not installed.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        if isinstance(error, IncompatibleVersionError):
            raise
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] != package:
            raise  # another package is missing
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise
        raise incompatible(package, str(error)) from error
