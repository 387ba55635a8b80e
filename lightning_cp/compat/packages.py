"""Describe a package that is missing, with the command that installs a tested version of it."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec
from traceback import walk_tb

_DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow", "hydra": "hydra-core", "imageio": "imageio[ffmpeg]"}
_BACKEND = re.compile(r"requires the (\w+) library but it was not found")  # an ImportError of diffusers


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
