"""Devices as data: the rates from which the time of a step is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from lightning_cp.device_profile import DeviceProfile
from lightning_cp.rules import Number

NEEDED = ("tflops", "memory_gb", "memory_gbs", "link_gbs", "network_gbs")  # figures without a default
DATASHEET, MEASURED = "datasheet", "measured"
GB = 1e9


@dataclass(frozen=True)
class Device:
    """A device, its host and its links. Bandwidths are those of one rank, in one direction.

    Attributes:
        name: for tables and messages.
        tflops: peak of matrix products in bfloat16 (CPU: float32), in TFLOP/s.
        memory_gb: memory, in 10^9 bytes.
        memory_gbs: bytes read and written per second by operators that are not products, in GB/s.
        link_gbs: bandwidth between ranks of a node.
        network_gbs: bandwidth between nodes.
        node_ranks: ranks of a node.
        matmul_share, attention_share: shares of `tflops` that matrix products and attention reach.
        shards_share: share of the bandwidth between ranks that the collectives of sharded weights reach.
        call_us: host time of a call into PyTorch in forward, in microseconds.
        backward_call_us: the same in backward and in the optimizer's step.
        exchange_us: additional host time of an exchange.
        kernel_us: shortest time of an operator on the device.
        latency_us: time of an exchange without data.
        kind: "cuda": the host launches ahead of the device. "cpu": each operator ends before the next call.
        capability: compute capability of a GPU; selects kernels.
        source: where the rates are from: "datasheet", "measured", or a text.
    Raises: ValueError: a rate is not a positive number.
    """

    name: str
    tflops: float
    memory_gb: float
    memory_gbs: float
    link_gbs: float
    network_gbs: float
    node_ranks: int = 8
    matmul_share: float = 0.65
    attention_share: float = 0.6
    shards_share: float = 1.0
    call_us: float = 9.0
    backward_call_us: float = 7.5
    exchange_us: float = 50.0
    kernel_us: float = 4.0
    latency_us: float = 15.0
    kind: Literal["cpu", "cuda"] = "cuda"
    capability: tuple[int, int] = (9, 0)
    source: str = DATASHEET

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "cuda"):
            raise ValueError(f"gpu.kind={self.kind!r} must be cpu or cuda")
        if not _are_two_integers(self.capability):
            raise ValueError(f"gpu.capability={self.capability!r} must be two integers, for example [9, 0]")
        object.__setattr__(self, "capability", tuple(self.capability))
        for field in fields(self):
            value = getattr(self, field.name)
            rule = Number(0) if field.name.endswith("_us") else Number(above=0)
            if field.type in ("float", "int") and not rule.passes(value):
                raise ValueError(f"gpu.{field.name}={value!r} must be {rule.describe()}")

    @property
    def is_calibrated(self) -> bool:
        """True if all rates were measured on the machine that is planned for (none is missing in its file)."""
        return self.source == MEASURED

    def profile(self) -> DeviceProfile:
        """Return the device that a dry run behaves for."""
        return DeviceProfile(self.name, self.kind, self.capability)

    def bandwidth(self, span: int) -> float:
        """Return bytes per second of a communicator. Args: span: consecutive ranks that it lies in."""
        return (self.link_gbs if span <= self.node_ranks else self.network_gbs) * GB


def _are_two_integers(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(x, int) for x in value)


# Peaks, memory and links are the vendors' (dense, without sparsity), links 80 % of them. Host times, `kernel_us` and
# the shares are fitted to measurements of one rank on an H100 (docs/measured.md), and assumed for the other GPUs.
_PARTLY = "datasheet; host time, kernels and attention measured on one GPU"
DEVICES = {
    "a100": Device("A100 80 GB", 312, 80, 1935, 240, 20, capability=(8, 0)),
    "h100": Device("H100 80 GB", 989, 80, 3350, 360, 40, source=_PARTLY),
    "h200": Device("H200 141 GB", 989, 141, 4800, 360, 40, source=_PARTLY),
    "b200": Device("B200 180 GB", 2250, 180, 7700, 720, 40, capability=(10, 0)),
    "l40s": Device("L40S 48 GB", 362, 48, 864, 20, 20, capability=(8, 9)),
    "rtx4090": Device("RTX 4090 24 GB", 165, 24, 1008, 10, 5, capability=(8, 9)),
    "cpu": Device(
        "CPU core", 0.06, 8, 8, 1, 0.1, node_ranks=64, matmul_share=0.8, attention_share=0.5, call_us=6,
        backward_call_us=6, exchange_us=100, kernel_us=1, latency_us=50, kind="cpu", source="assumed",
    ),
}  # fmt: skip


def name_in_table(gpu: str) -> str | None:
    """Return the name in the table of a GPU that CUDA calls `gpu`; None: it is not there."""
    short = gpu.lower().replace(" ", "")
    return next((name for name, device in DEVICES.items() if device.kind == "cuda" and name in short), None)


def device_named(name: str, figures: Mapping[str, Any] | None = None) -> Device:
    """Return a device of the table, or one with these figures.

    Args:
        name: name in the table; any other name if `figures` has all rates without a default.
        figures: attributes of `Device` that differ from the table.
    Raises: ValueError: an unknown device or figure; says which figures are needed.
    """
    figures = {key: value for key, value in (figures or {}).items() if value is not None}
    known = {field.name for field in fields(Device)}
    unknown = sorted(str(key) for key in figures.keys() - known)
    missing = [] if name in DEVICES else [key for key in NEEDED if key not in figures]
    if missing:
        others = f" ({', '.join(unknown[:5])}: no figures of a device)" if unknown else ""
        raise ValueError(
            f"gpu={name} is not in the table of devices ({', '.join(DEVICES)}) and has no {', '.join(missing)}{others}."
            f" Give its figures, 'gpu={{name: {name}, {', '.join(f'{key}: …' for key in NEEDED)}}}', or measure them "
            "on the machine: lightning-cp plan calibrate=true writes device.yaml, for gpu=device.yaml"
        )
    if unknown:
        raise ValueError(f"gpu.{unknown[0]} is no figure of a device: use some of {', '.join(sorted(known))}")
    if figures.get("source") == MEASURED and (missing := sorted(known - figures.keys() - {"name"})):
        figures["source"] = f"measured, but without {', '.join(missing)}"
    if name in DEVICES:
        return replace(DEVICES[name], **({"source": "given", **figures} if figures else {}))
    return Device(**{"name": name, "source": "given", **figures})
