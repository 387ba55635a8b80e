"""The time of a step, from its dry run: the host launches, one compute stream runs, and each communicator sends."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from lightning_cp.planning.devices import Device
from lightning_cp.planning.recorder import WEIGHTS
from lightning_cp.planning.step import Compute, Layout, Start, Step, Wait

COMPUTE, HOST = "compute", "host"
_PRODUCTS = ("::mm", "::bmm", "::addmm", "::baddbmm", "::convolution", "::convolution_backward")


@dataclass(frozen=True)
class Times:
    """The time of a step of one rank.

    Attributes:
        seconds: seconds of the step.
        by_bound: seconds in which the device computes, waits for the host, or for a link.
    """

    seconds: float
    by_bound: dict[str, float]

    @property
    def bound(self) -> str:
        """What takes most of the time: "compute", "host", or the name of a communicator."""
        return max(self.by_bound, key=self.by_bound.__getitem__)


def span_of(link: str, layout: Layout) -> int:
    """Return the number of consecutive ranks that a communicator lies in. Ulysses is innermost."""
    context = layout.ring * layout.ulysses
    spans = {"ulysses": layout.ulysses, "row": layout.columns * layout.ulysses}
    return (spans | dict.fromkeys(("ring", "column", "context", WEIGHTS), context)).get(link, layout.ranks)


def seconds_of(event: Compute, device: Device) -> float:
    """Return the time of an operator: the longer one of its products, its memory, and its launches."""
    share = device.attention_share if "attention" in event.name else device.matmul_share
    counts = "attention" in event.name or event.name.endswith(_PRODUCTS)
    products = event.flops / (device.tflops * share * 1e12) if counts else 0.0
    return max(products, event.moved_bytes / (device.memory_gbs * 1e9), device.kernel_us * 1e-6)


def time_step(step: Step, device: Device) -> Times:
    """Compute the time of a step.

    The host needs its time for each call; an operator begins when the host has launched it and the one before has
    ended; a transfer begins when the host has started it, what was computed before has ended, and the one before on its
    communicator has ended; a wait blocks the compute stream until the transfer has ended. FSDP2's all-gathers of the
    next weights do not wait for what was computed before, but for the use of the weights before.
    """
    events = sum(len(part.events) * part.repeats for part in step.parts)
    calls = step.calls / max(events, 1)  # views and allocations are calls, but no events
    clock = _Clock(device, step.layout)
    is_backward = False
    for part in step.parts:
        is_backward |= "backward" in part.name
        call_s = calls * (device.backward_call_us if is_backward else device.call_us) * 1e-6
        for _ in range(part.repeats):
            clock.first = len(clock.ends)
            for event in part.events:
                clock.host += call_s
                clock.run(event)
    clock.wait(max(clock.ends, default=0.0), clock.last_link)
    if clock.host > clock.compute:
        clock.idle(clock.host, HOST)
    return Times(clock.compute, dict(clock.by_bound))


class _Clock:
    """Moments of the host, the compute stream and the communicators, in seconds from the begin of the step."""

    def __init__(self, device: Device, layout: Layout) -> None:
        self._device, self._layout = device, layout
        self.host = self.compute = 0.0
        self.by_bound: defaultdict[str, float] = defaultdict(float, {COMPUTE: 0.0})
        self.ends: list[float] = []  # of transfers
        self.first = 0  # index of the part's first transfer
        self._links: dict[str, float] = {}  # when each is free
        self._used: dict[str, float] = {}  # when the compute stream has last waited for it
        self._names: list[str] = []  # links of the transfers

    @property
    def last_link(self) -> str:
        """Link of the transfer that ends last."""
        return self._names[max(range(len(self.ends)), key=self.ends.__getitem__)] if self.ends else COMPUTE

    def run(self, event: Compute | Start | Wait) -> None:
        """Run an event, launched now."""
        if isinstance(event, Compute):
            self.idle(self.host, HOST)
            seconds = seconds_of(event, self._device)
            self.compute += seconds
            self.by_bound[COMPUTE] += seconds
        elif isinstance(event, Start):
            self.host += self._device.exchange_us * 1e-6
            span = span_of(event.link, self._layout)
            bandwidth = self._device.bandwidth(span) * (self._device.shards_share if event.of_shards else 1.0)
            ready = self._used.get(event.link, 0.0) if event.is_ahead else self.compute
            link = "column" if event.link == "row" and span > self._device.node_ranks else event.link  # between nodes
            begin = max(self.host, ready, self._links.get(link, 0.0))
            end = begin + self._device.latency_us * 1e-6 + event.sent_bytes / bandwidth
            self._links[link] = end
            self.ends.append(end)
            self._names.append(event.link)
            if self._device.kind == "cpu":  # the core that computes also copies what is sent
                self.idle(end, event.link)
        elif event.number is None:
            self.wait(max(self.ends, default=0.0), self.last_link)
        else:
            index = self.first + event.number - 1
            self.wait(self.ends[index], self._names[index])
            self._used[self._names[index]] = self.compute
        if self._device.kind == "cpu":  # an operator ends before the host continues
            self.host = max(self.host, self.compute)

    def wait(self, end: float, link: str) -> None:
        """Let the compute stream wait for a transfer. Until the host has launched the wait, it waits for the host."""
        self.idle(min(self.host, end), HOST)
        self.idle(end, link)

    def idle(self, until: float, bound: str) -> None:
        """Let the compute stream wait."""
        if until > self.compute:
            self.by_bound[bound] += until - self.compute
            self.compute = until
