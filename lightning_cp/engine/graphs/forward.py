"""Run the forwards of a parallel model in CUDA graphs: what a graph is valid for, when it is captured and dropped.

A forward with new arguments runs eagerly at first, is then captured, and later replayed. A graph repeats the kernels of
one forward, so whatever decides which kernels run is part of its key: shapes and strides of tensors, all other
arguments, and the Python values that the model's modules hold. Arguments are compared between ranks before each replay,
as before each forward.

All ranks of a context group capture, replay and drop the same graphs, because each of these decisions depends on facts
that are equal on all of them, or is agreed on when it is taken. A replay needs no agreement.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_cp.comm.background import is_capturing
from lightning_cp.comm.stats import STATS
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.comm.transforms import transforms_are_on
from lightning_cp.compat.torch_names import TreeSpec, function_modes, has_global_hooks, tree_flatten, tree_unflatten
from lightning_cp.engine.attention.diffusers_dispatch import kernel_for
from lightning_cp.engine.graphs import recorder
from lightning_cp.engine.graphs.model_state import PLAIN, ModelState, compared
from lightning_cp.engine.graphs.recorder import GraphRecorder, Recording, Timing
from lightning_cp.engine.installed import Installed, installed_on
from lightning_cp.engine.paths import unwrapped
from lightning_cp.engine.peers.checksum import checksum
from lightning_cp.errors import InterceptionError, PlanError
from lightning_cp.nest import named_leaves
from lightning_cp.undoable import Undo, intercept_calls

Graphs = bool | Literal["auto"]

_EAGER_FORWARDS = 2  # compared between ranks in full; they connect all pairs of ranks and compile kernels
_HOST_IS_LIMIT = 0.9  # host time of a forward over its time until the GPU has finished
_MOST_GRAPHS = 8
_MOST_MEMORY = 1 / 8  # of the device's memory, for all graphs of a model
_MOST_KEYS = 64
_NEW_KEYS = 8  # in a row, after which the reason is logged

_SETTINGS: tuple[Any, ...] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.get_float32_matmul_precision,
    torch.are_deterministic_algorithms_enabled,
    torch.get_default_dtype,
)

_log = logging.getLogger("lightning_cp")


@dataclass(eq=False)
class _Entry:
    """The forwards of one key.

    Attributes:
        forwards: number of eager forwards so far.
        is_checked: one of them was seen to change nothing.
        timing: time of the last of them, with graphs="auto".
        is_eager: True: it was decided not to capture.
        inputs: the tensors that the graph reads.
    """

    forwards: int = 0
    is_checked: bool = False
    timing: Timing | None = None
    is_eager: bool = False
    inputs: list[Tensor] = field(default_factory=list)
    recording: Recording | None = None


class GraphedForward:
    """Runs the calls of one parallel model in CUDA graphs; `run` is a wrapper for `intercept_calls`.

    Args:
        installed: the parallel model.
        graphs: True: capture each key. "auto": only if the host, and not the GPU, limits the speed.
        recorder_of: returns the recorder for a device, None if there is none; models that share it share memory.
    """

    def __init__(
        self, installed: Installed, graphs: Graphs, recorder_of: Callable[[torch.device], GraphRecorder | None]
    ) -> None:
        self.installed, self._graphs, self._recorder_of = installed, graphs, recorder_of
        self._name = type(installed.module).__name__
        self._entries: dict[Hashable, _Entry] = {}  # least recently used first
        self._state: ModelState | None = None
        self._is_stale = False
        self._logged: set[str] = set()
        self._new_keys, self._last_key = 0, (None,) * 8
        self._lock = threading.Lock()

    @property
    def num_graphs(self) -> int:
        """Number of graphs that can be replayed."""
        return sum(entry.recording is not None for entry in self._entries.values())

    @property
    def num_bytes(self) -> int:
        """Memory of all graphs; for each graph that of the rank that needs most."""
        return sum(entry.recording.num_bytes for entry in self._entries.values() if entry.recording is not None)

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one forward: eagerly, captured, or replayed.

        Ranks: all of the context group. Raises: InterceptionError: another thread is in a forward.
        """
        if not self._lock.acquire(blocking=False):
            raise InterceptionError(
                f"{self._name} is called while another thread, or a forward of its own, is in a call of it: with CUDA "
                "graphs, all calls must be made one after another"
            )
        try:
            return self._run(call, args, kwargs)
        finally:
            self._lock.release()

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        recorder = None if first is None or type(first) is not Tensor else self._recorder_of(first.device)
        if recorder is None or torch.compiler.is_compiling() or is_capturing() or not self.installed.is_current():
            return call(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        reason = self._why_eager(leaves, args, kwargs, recorder.device)
        if reason:
            self._log_once(reason)
            return call(*args, **kwargs)
        kinds = _kinds(leaves, spec)
        entry = self._entry_of((*kinds, *self._surroundings(), recorder.stream()))
        if entry.recording is not None:
            return self._replay(entry, args, kwargs, tensors)
        if entry.is_eager:
            return call(*args, **kwargs)
        entry.forwards += 1
        if entry.forwards <= _EAGER_FORWARDS:
            return self._run_eagerly(entry, call, args, kwargs)
        if self._graphs == "auto":
            if entry.timing is None:
                result, entry.timing = recorder.timed(lambda: call(*args, **kwargs))
                return result
            if not self._host_is_limit(entry.timing):
                entry.is_eager = True
                return call(*args, **kwargs)
        if not self._capture(entry, recorder, call, leaves, spec):
            return call(*args, **kwargs)
        return self._replay(entry, args, kwargs, tensors)

    def must_drop(self) -> bool:
        """Return True if a weight was moved or exchanged since the graphs were captured."""
        if self._state is None or not self.num_graphs:
            return self._is_stale
        self._state.refresh()
        return self._is_stale or self._state.weights_moved()

    def drop(self) -> None:
        """Free all graphs. Following forwards are eager, and then captured, as at first. Ranks: the context group."""
        for entry in self._entries.values():
            if entry.recording is not None:
                entry.recording.free()
        self._entries.clear()
        self._state, self._is_stale = None, False

    def _why_eager(self, leaves: list[Any], args: Any, kwargs: Any, device: torch.device) -> str:
        """Return why this forward cannot run in a graph; "" if it can."""
        installed = self.installed
        if torch.is_grad_enabled():
            return "gradients are enabled (call it in torch.no_grad())"
        if transforms_are_on():
            return "it runs inside of a transform of torch.func or forward_ad"
        if function_modes() or has_global_hooks():  # type: ignore[no-untyped-call]
            return "a mode of torch or a global hook runs Python code"
        if installed.caches:
            names = ", ".join(kind.name for kind in installed.caches.kinds)
            return f"{names} decides in Python which blocks to compute"
        if installed.session.evaluation is not None:
            return "it is computed in patches or stages"
        if self._state is None:
            self._state = ModelState(installed.module)
        self._state.refresh()
        has_graphs = self.num_graphs > 0
        if has_graphs and self._state.weights_moved():
            self._is_stale = True
        if self._is_stale:
            return "weights were moved or exchanged after the capture"
        if self._state.hooked:
            return f"a forward hook of {self._state.hooked} runs Python code"
        if cache := self._state.full_cache():
            return f"the cache of {cache} is full, and would drop tensors that graphs read"
        if self._state.opaque:
            return f"changes of {self._state.opaque} could not be noticed"
        if self._state.is_sharded:
            return "its weights are sharded"
        if not has_graphs and self._state.device() != device:
            return f"its weights are not all on {device}"
        for x in leaves:
            problem = _problem(x, device)
            if problem:
                return f"{self._name_of(x, args, kwargs)} is {problem}"
        return ""

    def _name_of(self, leaf: object, args: Any, kwargs: Any) -> str:
        arguments = self.installed.signature.bind_partial(None, *args, **kwargs).arguments
        return next((name for name, x in named_leaves("", arguments) if x is leaf), "an argument")

    def _surroundings(self) -> tuple[Hashable, ...]:
        """Return what a forward depends on besides its arguments."""
        session = self.installed.session
        assert self._state is not None, "made by `_why_eager`"
        attention = kernel_for(session, None), *(setting() for setting in _SETTINGS)
        modes = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        return self._state.number, session.groups.name, attention, modes

    def _entry_of(self, key: tuple[Any, ...]) -> _Entry:
        """Return the entry of a key as the most recently used one, a new one if there is none."""
        entry = self._entries.pop(key, None)
        self._new_keys = self._new_keys + 1 if entry is None else 0
        if self._new_keys > _NEW_KEYS:
            self._log_once(f"{self._difference(key)} differs in each forward")
        self._last_key = key
        self._entries[key] = _Entry() if entry is None else entry
        if len(self._entries) > _MOST_KEYS:
            self._forget(next(iter(self._entries)))
        return self._entries[key]

    def _difference(self, key: tuple[Any, ...]) -> str:
        assert self._state is not None, "made by `_why_eager`"
        if key[3] != self._last_key[3]:
            return f"{self._state.changed} of the model"
        return "an argument" if key[:3] != self._last_key[:3] else "a setting of torch or of attention"

    def _run_eagerly(self, entry: _Entry, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one of the first forwards. The last of them shows whether forwards do more than to compute a result."""
        assert self._state is not None, "made by `_why_eager`"
        if not self.num_graphs:
            self._state.note_weights()
        before, is_last = self._state.number, entry.forwards == _EAGER_FORWARDS
        arguments = _contents(args, kwargs) if is_last else None
        result = call(*args, **kwargs)
        if is_last:
            self._state.refresh()
            changed = f"{self._state.changed} of the model" if self._state.number != before else ""
            changed = changed or ("an argument" if _contents(args, kwargs) != arguments else "")
            others = [type(x).__name__ for x in tree_flatten(result)[0] if not isinstance(x, (Tensor, *PLAIN))]
            if changed or others:
                entry.is_eager = True
                self._log_once(f"it changes {changed}" if changed else f"its result has a {others[0]}")
            entry.is_checked = True
        return result

    def _host_is_limit(self, timing: Timing) -> bool:
        """Decide whether to capture, from the time of an eager forward. Ranks: the context group."""
        share = timing.host_share()
        shares = [percent for (percent,) in self._gather([-1 if share is None else int(100 * share)])]
        is_limit = min(shares) >= 100 * _HOST_IS_LIMIT
        if is_limit:
            self._log(f"the host needs {min(shares)} % of the time of a forward, so forwards are captured")
        else:
            by_gpu = "still computes when the host is ready" if -1 in shares else "needs longer than the host"
            self._log(f"the GPU {by_gpu}, so a CUDA graph would save no time, and forwards stay eager")
        return is_limit

    def _capture(
        self, entry: _Entry, recorder: GraphRecorder, call: Callable[..., Any], leaves: list[Any], spec: TreeSpec
    ) -> bool:
        """Capture a forward on all ranks of the context group, or on none of them. Returns: True if it is captured."""
        assert self._state is not None, "made by `_why_eager`"
        problem = "weights move in each forward" if self._state.weights_moved() else ""
        recording = None
        try:
            if not problem and entry.is_checked:
                own = {id(x): _static(x) for x in leaves if isinstance(x, Tensor)}  # one for an argument given twice
                entry.inputs = [own[id(x)] for x in leaves if isinstance(x, Tensor)]
                args, kwargs = tree_unflatten([own.get(id(x), x) for x in leaves], spec)
                recording = recorder.capture(lambda: call(*args, **kwargs))
        except (
            Exception
        ) as error:  # anything that the host needs to know of the GPU in a forward, and too little memory
            problem = f"{type(error).__name__}: {error}".strip().split("\n")[0]
        size = 0 if recording is None else recording.num_bytes
        by_rank = self._gather([recording is not None, size, entry.is_checked])
        num_bytes, most_bytes = max(size for _, size, _ in by_rank), int(recorder.total_bytes * _MOST_MEMORY)
        failed = [rank for rank, (succeeded, *_) in enumerate(by_rank) if not succeeded]
        if not all(is_checked for *_, is_checked in by_rank):  # the forward that would have shown it raised an error
            if recording is not None:
                recording.free()
            entry.forwards, entry.inputs = _EAGER_FORWARDS - 1, []
            return False
        if failed:
            problem = problem or f"it could not be captured on rank {failed[0]} of the context group"
        elif num_bytes > most_bytes:
            problem = f"a graph of it takes {num_bytes / 1e9:.1f} GB, more than {most_bytes / 1e9:.1f}"
        if problem:
            if recording is not None:
                recording.free()
            entry.is_eager, entry.inputs = True, []
            self._log_once(problem, level=logging.WARNING)
            return False
        assert recording is not None, "else there is a problem"
        recording.num_bytes = num_bytes  # the same on all ranks, which then drop the same graphs
        entry.recording = recording
        while self.num_graphs > _MOST_GRAPHS or self.num_bytes > most_bytes:
            self._forget(next(key for key, one in self._entries.items() if one.recording is not None))
        self._log(f"captured in CUDA graph {self.num_graphs} of at most {_MOST_GRAPHS}, {self.num_bytes / 1e9:.2f} GB")
        return True

    def _replay(self, entry: _Entry, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        assert entry.recording is not None, "the caller has checked it"
        self.installed.before_replay(args, kwargs)
        for own, x in zip(entry.inputs, tensors, strict=True):
            _base(own).copy_(_base(x))
        entry.recording.replay()
        STATS.note_replay(self.installed.module)
        results, spec = tree_flatten(entry.recording.output)
        return tree_unflatten([x.clone() if isinstance(x, Tensor) else x for x in results], spec)

    def _forget(self, key: Hashable) -> None:
        entry = self._entries.pop(key)
        if entry.recording is not None:
            entry.recording.free()

    def _gather(self, values: list[int]) -> list[list[int]]:
        group = self.installed.session.groups.context
        return [values] if group is None else all_gather_ints([int(x) for x in values], group=group)

    def _log_once(self, reason: str, *, level: int = logging.INFO) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            level = logging.WARNING if self._graphs is True else level
            self._log(f"forwards run without CUDA graphs: {reason}", level=level)

    def _log(self, text: str, *, level: int = logging.INFO) -> None:
        if self.installed.session.groups.context_rank == 0:
            _log.log(level, "%s: %s", self._name, text)


def _kinds(leaves: list[Any], spec: TreeSpec) -> tuple[Hashable, ...]:
    """Return the part of the key for arguments: the form of each, and which are given twice."""
    places = list(map(id, leaves))
    return tuple(map(_kind, leaves)), repr(spec), tuple(places.index(id(x)) for x in leaves if isinstance(x, Tensor))


def _contents(args: Any, kwargs: Any) -> tuple[Hashable, ...]:
    """Return what differs after a forward has written into its arguments. Waits for a GPU in inference mode only."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors = (x for x in leaves if isinstance(x, Tensor))
    return _kinds(leaves, spec), *(checksum(x) if x.is_inference() else x._version for x in tensors)


def _kind(x: Any) -> Hashable:
    """Return the part of the key for one leaf of the arguments."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.stride(), x.device
    return compared(x)


def _problem(x: Any, device: torch.device) -> str:
    """Return why a leaf of the arguments cannot be that of a graph; "" if it can."""
    if not isinstance(x, Tensor):
        return "" if isinstance(x, PLAIN) else f"a {type(x).__name__}, which cannot be compared by value"
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.is_conj() or x.is_neg():
        return f"a {type(x).__name__} of a special kind"
    if x.device != device:
        return f"on {x.device}, not on {device}"
    base = _base(x)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(base.shape, base.stride(), strict=True))
    return "a tensor with overlapping memory" if base.numel() > extent else ""


def _base(x: Tensor) -> Tensor:
    """Return an expanded tensor (with strides of 0) without its repetitions."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _static(x: Tensor) -> Tensor:
    """Allocate a tensor with the form of another one, for a graph to read, and copy its values."""
    base = _base(x)
    own = torch.empty_strided(base.shape, base.stride(), dtype=x.dtype, device=x.device).copy_(base)
    return own.expand(x.shape)


def capture_forward(model: nn.Module) -> Undo:
    """Run the calls of a parallel model without gradients in CUDA graphs. Its interface does not change.

    The first 2 calls with arguments of a form run eagerly, the third one is captured, and later ones are replayed: the
    inputs are copied, and the outputs are new tensors. Another form is another graph; a model keeps the 8 that were
    used last. A call that cannot be captured runs eagerly, and the reason is logged once. (`parallelize_pipeline` has
    this as `graphs=`.)

    Args: model: a model that `apply_context_parallel` has made parallel, on CUDA; degrees of 1 are possible.
    Returns: a function that frees the graphs and restores the calls. To move the model's weights, or to exchange them,
        call it before, and `capture_forward` again afterwards; otherwise calls run eagerly from then on.
    Ranks: all of the context group, also in every call, with the same settings and adapters.
    Raises: PlanError: the model is not parallel.
    """
    module = unwrapped(model)
    installed = installed_on(module)
    if installed is None:
        raise PlanError(
            f"{type(module).__name__} is not context-parallel: call apply_context_parallel first (degrees of 1 are "
            "possible)"
        )
    graphed = GraphedForward(installed, True, cache(recorder.recorder_for))
    restore = intercept_calls(module, graphed.run)

    def undo() -> None:
        restore()
        graphed.drop()

    return undo
