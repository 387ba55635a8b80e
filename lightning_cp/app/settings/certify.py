"""Check `certify=true`: one process must be able to train the run's first steps.

Imports neither torch nor diffusers.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from lightning_cp.app.settings.components import components_of
from lightning_cp.app.settings.finetune import is_finetuning
from lightning_cp.app.settings.table import SettingsError, read, show
from lightning_cp.app.settings.world import is_single
from lightning_cp.files import open_regular, parse_json
from lightning_cp.finetune.family_table import CONTROLNET, VACE
from lightning_cp.launch.machine import free_memory_bytes

_BYTES = {"float32": 4, "bfloat16": 2}
_TRAINED_BYTES = 16  # per trained weight: its gradient, two averages of AdamW and the EMA, in float32
_MAX_HEADER_BYTES = 100 << 20


def check_certify(config: DictConfig, *, accelerator: str) -> None:
    """Check that the losses can be compared with those of one process, if `certify` is set.

    Raises: SettingsError: the run has no other topology, has no first steps, or one process cannot hold the model.
    """
    if not read(config, "certify", False):
        return
    if is_single(config):
        raise SettingsError("certify=true compares with one process, but strategy=single is one: use strategy=cp")
    if read(config, "resume") is not None:
        raise SettingsError(
            f"certify=true compares the first steps, which a run with resume={show(read(config, 'resume'))} does not "
            "have: certify a new run"
        )
    if read(config, "log_every") != 1:
        raise SettingsError(
            f"certify=true needs the loss of each step: set log_every=1, not {read(config, 'log_every')}"
        )
    if is_finetuning(config):
        _check_memory(config, accelerator)


def _check_memory(config: DictConfig, accelerator: str) -> None:
    """Compare the memory of weights, gradients and optimizer states with the free memory.

    Activations are not counted. A pipeline on the Hub is checked only if its files are already downloaded.
    """
    pipeline, names = Path(str(read(config, "model.pretrained"))), components_of(config)
    dtype_bytes, sizes = _BYTES[str(read(config, "model.dtype"))], [dict(_sizes(pipeline / name)) for name in names]
    totals = [sum(x.values()) for x in sizes]
    controls = [n for x in sizes for name, n in x.items() if name.startswith(VACE)]
    trained = (sum(controls) or sum(totals)) if config.get("lora") is None else 0
    weights = sum(totals) if trained or accelerator == "cpu" else max(totals)  # one frozen expert at a time on a GPU
    needed = weights * dtype_bytes + trained * _TRAINED_BYTES
    if names == [CONTROLNET]:  # in float32, with the frozen transformer
        needed += weights * (_BYTES["float32"] - dtype_bytes)
        needed += sum(dict(_sizes(pipeline / "transformer")).values()) * dtype_bytes
    free = free_memory_bytes(accelerator) if needed else None
    if free is not None and needed > free:
        where, folders = "GPU memory" if accelerator != "cpu" else "memory", pipeline / " and ".join(names)
        raise SettingsError(
            f"certify=true trains on one process too, which needs at least {needed / 2**30:.1f} GiB for the "
            f"{weights:,} weights of {folders}, gradients and optimizer states, but {free / 2**30:.1f} GiB of {where} "
            "are free: set certify=false, or certify a smaller model of the same class"
        )


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield name and number of elements of each tensor in the safetensors files of a folder, from their headers."""
    for path in sorted(folder.glob("diffusion_pytorch_model*.safetensors")):
        try:
            with open_regular(path) as file:
                length = int.from_bytes(file.read(8), "little")
                header = parse_json(file.read(length)) if length <= _MAX_HEADER_BYTES else {}
            yield from ((name, math.prod(x["shape"])) for name, x in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingsError(f"model.pretrained: {path} is damaged, or cannot be read: {error}") from None
