"""Fake CUDA tensors on any build of torch: one for CPU gets a device guard, which needs a C++ compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _device_guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    if torch.version.cuda is not None:
        return
    compiler, folder = shutil.which("g++") or shutil.which("c++"), Path(torch.__file__).parent
    if compiler is None:
        pytest.skip("needs a C++ compiler, or a build of torch with CUDA")
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    source = Path(__file__).with_name("guard.cpp")
    places = [f"-I{folder}/include", f"-L{folder}/lib", "-lc10"]
    subprocess.run([compiler, "-shared", "-fPIC", "-std=c++20", str(source), "-o", str(library), *places], check=True)
    ctypes.CDLL(str(library))
