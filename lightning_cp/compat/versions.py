"""Tested versions of other packages, and errors for a package that is missing or lacks a private name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from traceback import walk_tb

# Package -> oldest and newest version that the tests were run with. The newest ones are upper bounds in pyproject.toml.
TESTED = {
    "torch": ("2.11.0", "2.14.1"),
    "lightning": ("2.6.0", "2.6.6"),
    "diffusers": ("0.42.1", "0.42.1"),
    "accelerate": ("1.0.0", "1.15.0"),
}
_DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow", "hydra": "hydra-core", "imageio": "imageio[ffmpeg]"}
_BACKEND = re.compile(r"requires the (\w+) library but it was not found")  # an ImportError of diffusers


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
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else f"{package}."
        if isinstance(error, IncompatibleVersionError) or missing == package or missing.split(".")[0] != package:
            raise  # it, or another package, is not installed
        raise incompatible(package, str(error)) from error


def install_command(package: str) -> str:
    """Return the command that installs a package, in a version that we allow. Args: package: its name in imports."""
    name = _DISTRIBUTIONS.get(package, package)
    try:
        listed = metadata.requires("lightning-cp") or []
    except metadata.PackageNotFoundError:
        listed = []
    wanted = (line.partition(";")[0].strip() for line in listed)
    found = next((line for line in wanted if re.split(r"[\[<>=!~ ]", line)[0] == re.split(r"\[", name)[0]), name)
    return f"pip install '{found}'"


def needs(purpose: str, package: str) -> str:
    """Return the line for a missing package. Args: purpose: what needs it, as the subject of a sentence."""
    return f"{purpose} needs the package {package}, which is not installed: {install_command(package)}"


def _named(error: BaseException) -> list[str]:
    """Return the packages that an error is about."""
    if isinstance(error, ModuleNotFoundError):
        return [(error.name or "").partition(".")[0]]
    if isinstance(error, ImportError):
        return [name.lower() for name in _BACKEND.findall(str(error))]
    if not isinstance(error, AttributeError) or error.__traceback__ is None:
        return []
    *_, (frame, _) = walk_tb(error.__traceback__)  # in a class that diffusers puts in place of a real one
    return list(getattr(frame.f_locals.get("cls"), "_backends", []))


def missing_package(error: BaseException, purpose: str) -> str | None:
    """Return the line for an error that a missing package caused; None if it has another cause. See `needs`."""
    cause: BaseException | None = error
    while cause is not None:
        for package in _named(cause):
            if package not in ("", "lightning_cp") and find_spec(package) is None:
                return needs(purpose, package)
        cause = cause.__cause__ or cause.__context__
    return None
