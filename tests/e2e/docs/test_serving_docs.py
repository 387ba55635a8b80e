"""The program of docs/serving.md serves real clients: pictures of one process, whatever shares a call."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.e2e.recipe import ROOT
from tests.pipelines import PIPES

PROGRAM = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(), re.DOTALL)[0]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _post(port: int, **job: Any) -> np.ndarray[Any, Any]:
    data = json.dumps({"height": 48, "width": 32, "steps": 2, **job}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/images", data, headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return np.asarray(Image.open(io.BytesIO(answer.read()))).astype(int)


def _answers(port: int) -> bool:
    """Return whether the service refuses a job without steps."""
    try:
        _post(port, prompt="", steps=0)
    except urllib.error.HTTPError as error:
        return error.code == 422
    except OSError:
        return False
    return False


@pytest.fixture
def services(tmp_path: Path) -> Iterator[list[tuple[int, subprocess.Popen[str]]]]:
    """Ports and processes of two services, with 2 ranks and 1 rank."""
    PIPES["flux"].pipe().save_pretrained(tmp_path / "model")
    (tmp_path / "serve.py").write_text(PROGRAM)
    environ = {**os.environ, "MODEL": str(tmp_path / "model"), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with ExitStack() as stack:
        services = []
        for ranks in (2, 1):
            port = _free_port()
            process = subprocess.Popen(
                [*torchrun, f"--nproc-per-node={ranks}", "serve.py"],
                cwd=tmp_path,
                env={**environ, "PORT": str(port)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            services.append((port, process))
        until = time.monotonic() + 120
        for port, process in services:
            while not _answers(port):
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < until, "it does not start"
                time.sleep(0.2)
        yield services


@pytest.mark.full
def test_clients_get_one_process_pictures_and_the_services_end(
    services: list[tuple[int, subprocess.Popen[str]]],
) -> None:
    jobs: list[dict[str, Any]] = [{"prompt": f"a {x}", "seed": i} for i, x in enumerate(("cat", "dog", "bird"))]
    jobs.append({"prompt": "a cat", "seed": 0, "width": 48})
    requests = [(port, job) for port, _ in services for job in jobs]
    with ThreadPoolExecutor(len(requests)) as pool:
        found = list(pool.map(lambda request: _post(request[0], **request[1]), requests))
    pipe = PIPES["flux"].pipe()
    for (_, job), picture in zip(requests, found, strict=True):
        seeded = torch.Generator().manual_seed(job["seed"])
        alone = pipe(job["prompt"], height=48, width=job.get("width", 32), num_inference_steps=2, generator=seeded)
        assert np.abs(picture - np.asarray(alone.images[0]).astype(int)).max() <= 1
    for port, process in services:
        with pytest.raises(urllib.error.HTTPError, match="422"):  # it would fail the requests that share its call
            _post(port, prompt="a cat", seed=2**64)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert "Application shutdown complete" in output
