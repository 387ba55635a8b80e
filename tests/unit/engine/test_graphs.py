"""When a forward is captured, replayed, dropped or left eager, on CPU with a stand-in for CUDA graphs."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from threading import Event, Thread
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, WanTransformer3DModel
from diffusers.utils.torch_utils import lru_cache_unless_export
from peft import LoraConfig
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_cp import ContextParallelConfig, apply_context_parallel, capture_forward
from lightning_cp.engine.apply import installed_on
from lightning_cp.engine.graphs import forward
from lightning_cp.engine.graphs.forward import GraphedForward, Graphs
from lightning_cp.engine.graphs.model_state import ModelState
from lightning_cp.errors import InterceptionError, PlanError
from lightning_cp.undoable import intercept_calls
from tests.harness.recorder import OperatorsStandIn, StandIn

Inputs = dict[str, Any]


class Graphed:
    """A tiny model whose calls run in graphs of the stand-in."""

    def __init__(self, graphs: Graphs = True, *, lora: bool = False) -> None:
        torch.manual_seed(0)
        sizes: Any = {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 2,
            "ffn_dim": 32,
            "text_dim": 16,
        }
        self.model: Any = WanTransformer3DModel(**sizes, in_channels=4, out_channels=4, freq_dim=32).eval()
        if lora:
            self.model.add_adapter(LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False), "one")
            self.model.add_adapter(LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False), "two")
        apply_context_parallel(self.model.eval(), ContextParallelConfig())
        self.recorder, installed = StandIn(), installed_on(self.model)
        assert installed is not None
        self.forward = GraphedForward(installed, graphs, lambda _: self.recorder)
        self.is_on = True
        self.undo = intercept_calls(self.model, self._around)

    def _around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Inputs) -> Any:
        return self.forward.run(call, args, kwargs) if self.is_on else call(*args, **kwargs)

    def __call__(self, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            return self.model(**inputs)[0]  # type: ignore[no-any-return]

    def check(self, inputs: Callable[[int], Inputs] | None = None, calls: int = 4) -> None:
        """Call it several times; each result equals that of the model without graphs."""
        for seed in range(calls):
            arguments = (inputs or make_inputs)(seed)
            found = self(arguments)
            self.is_on = False
            expected = self(arguments)
            self.is_on = True
            assert torch.equal(found, expected)


def make_inputs(seed: int = 0, *, side: int = 6, **changed: Any) -> Inputs:
    torch.manual_seed(seed)
    clip, text = torch.randn(1, 4, 2, side, side), torch.randn(1, 5, 16)
    arguments: Inputs = {"hidden_states": clip, "timestep": torch.full((1,), 100.0 * seed)}
    return {**arguments, "encoder_hidden_states": text, "return_dict": False, **changed}


def test_the_third_forward_is_captured_and_later_ones_are_replayed() -> None:
    graphed = Graphed()
    counts = []
    for seed in range(5):
        graphed.check(lambda _, seed=seed: make_inputs(seed), calls=1)
        counts.append((graphed.recorder.captures, graphed.recorder.replays))
    assert counts == [(0, 0), (0, 0), (1, 1), (1, 2), (1, 3)]


def test_a_hook_that_is_registered_after_the_capture_runs() -> None:
    graphed, called = Graphed(), []
    graphed.check()
    assert graphed.recorder.captures == 1
    replays = graphed.recorder.replays
    handle = graphed.model.blocks[0].ffn.net[2].register_forward_hook(lambda *_: called.append(1))
    graphed.check(calls=1)
    assert (len(called), graphed.recorder.replays) == (2, replays), "with the graph, and for the expected result"
    handle.remove()
    graphed.check(calls=1)
    assert graphed.recorder.replays == replays + 1


class _Scaled:
    """Scales the output of a feed-forward with a value that it holds somewhere."""

    scale = 1.0

    def apply(self, x: Tensor) -> Tensor:
        return x * self.scale


def _rename(module: Any) -> None:
    del module.other
    module.doubles = True


# what a feed-forward holds, what it computes from its output, and what is changed after the capture
HELD: dict[str, tuple[dict[str, Any], Callable[[Any, Tensor], Tensor], Callable[[Any], object]]] = {
    "attribute": ({"factor": 1.0}, lambda m, x: x * m.factor, lambda m: setattr(m, "factor", 3.0)),
    "attribute of an empty object": (
        {"scaled": _Scaled()},
        lambda m, x: x * m.scaled.scale,
        lambda m: setattr(m.scaled, "scale", 3.0),
    ),
    "owner of a method": (
        {"post": _Scaled().apply},
        lambda m, x: m.post(x),
        lambda m: setattr(m.post.__self__, "scale", 3.0),
    ),
    "name of an attribute": ({"other": True}, lambda m, x: x * (2 if hasattr(m, "doubles") else 1), _rename),
    "deep in dicts": (
        {"nested": {"a": {"b": {"c": {"d": {"e": [1.0]}}}}}},
        lambda m, x: x * m.nested["a"]["b"]["c"]["d"]["e"][0],
        lambda m: m.nested["a"]["b"]["c"]["d"].update(e=[3.0]),
    ),
    "number in a tensor": (
        {"number": torch.tensor(1.0)},
        lambda m, x: x * float(m.number),
        lambda m: m.number.fill_(3.0),
    ),
}


def test_a_value_that_changes_after_the_capture_counts() -> None:
    graphed = Graphed()
    graphed.recorder = OperatorsStandIn()
    layer = graphed.model.blocks[0].ffn
    original = layer.forward

    def compute(x: Tensor) -> Tensor:
        x = original(x)
        for _, use, _ in HELD.values():
            x = use(layer, x)
        return x

    layer.forward = compute
    for held, *_ in HELD.values():
        for key, value in held.items():
            setattr(layer, key, value)
    graphed.check()
    assert graphed.recorder.replays == 2
    for name, (*_, change) in HELD.items():
        before, captures = graphed(make_inputs(1)), graphed.recorder.captures
        change(layer)
        graphed.check()
        assert not torch.equal(graphed(make_inputs(1)), before), name
        assert graphed.recorder.captures == captures + 1, name


@pytest.mark.parametrize("decorator", [lru_cache, lru_cache_unless_export])
def test_a_full_cache_of_functions_is_not_read_by_graphs(decorator: Any) -> None:
    """Diffusers caches tensors of positions by size; a replay does not count as a use of them."""
    graphed = Graphed()
    graphed.check()

    class Full(type(graphed.model.rope)):  # type: ignore[misc]
        @decorator(maxsize=1)
        def positions(self) -> None: ...

    state = ModelState(graphed.model)
    assert not state.full_cache()
    graphed.model.rope.__class__ = Full
    graphed.model.rope.positions()
    assert "positions" in ModelState(graphed.model).full_cache()


def test_a_forward_that_failed_does_not_count_as_one_without_changes() -> None:
    graphed = Graphed()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), _failing(graphed.model.blocks[1]):
            graphed(make_inputs())
    graphed(make_inputs())
    assert graphed.recorder.captures == 0
    graphed.check()
    assert graphed.recorder.captures == 1


@contextmanager
def _failing(module: nn.Module) -> Iterator[None]:
    forward = module.forward
    module.forward = lambda *_, **__: 1 / 0
    try:
        yield
    finally:
        module.forward = forward


def test_two_threads_are_refused() -> None:
    graphed, inside, leave = Graphed(), Event(), Event()
    layer = graphed.model.blocks[0].ffn
    original = layer.forward

    def waits(x: Tensor) -> Tensor:
        inside.set()
        leave.wait(20)
        return original(x)  # type: ignore[no-any-return]

    layer.forward = waits
    thread = Thread(target=graphed, args=(make_inputs(),))
    thread.start()
    inside.wait(20)
    with pytest.raises(InterceptionError, match="another thread"):
        graphed(make_inputs())
    leave.set()
    thread.join()


def test_results_of_replays_are_new_tensors() -> None:
    graphed = Graphed()
    first, second = [graphed(make_inputs(seed)) for seed in range(5)][-2:]
    assert not torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_results_keep_their_class() -> None:
    graphed = Graphed()
    with torch.no_grad():
        outputs = [graphed.model(**make_inputs(1, return_dict=True)) for _ in range(4)]
    assert all(type(x) is type(outputs[0]) and torch.equal(x.sample, outputs[0].sample) for x in outputs)


def _strides(seed: int) -> Inputs:
    inputs = make_inputs(seed)
    return {**inputs, "hidden_states": inputs["hidden_states"].transpose(3, 4).contiguous().transpose(3, 4)}


def _twice(seed: int) -> Inputs:
    inputs = make_inputs(seed)
    return {**inputs, "attention_kwargs": {"mine": inputs["hidden_states"]}}


def _expanded(seed: int) -> Inputs:
    inputs = make_inputs(seed)
    return {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"][:, :1].expand(-1, 5, -1)}


# inputs that need another graph than `make_inputs`
OTHERS: dict[str, Callable[[int], Inputs]] = {
    "size": lambda seed: make_inputs(seed, side=8),
    "strides": _strides,
    "expanded": _expanded,
    "a tensor given twice": _twice,
    "a text": lambda seed: make_inputs(seed, attention_kwargs={"scale": 1.0}),
    "a time per token": lambda seed: make_inputs(seed, timestep=torch.full((1, 18), 5.0 * seed)),
}


def test_arguments_of_another_form_are_another_graph() -> None:
    graphed = Graphed()
    for _ in range(2):
        graphed.check()
        for inputs in OTHERS.values():
            graphed.check(inputs)
        assert graphed.forward.num_graphs == graphed.recorder.captures == 1 + len(OTHERS)


def test_autocast_and_inference_mode_are_other_graphs() -> None:
    graphed = Graphed()
    graphed.check()
    with torch.inference_mode():
        graphed.check()
    assert graphed.forward.num_graphs == 2


# a change of what the model reads, and its reverse
CHANGES: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "another adapter": (lambda m: m.set_adapter("two"), lambda m: m.set_adapter("one")),
    "no adapter": (lambda m: m.disable_adapters(), lambda m: m.enable_adapters()),
    "its scale": (lambda m: m.set_adapters("one", 0.5), lambda m: m.set_adapters("one", 1.0)),
    "training": (lambda m: m.blocks[1].train(), lambda m: m.blocks[1].eval()),
}


@pytest.mark.filterwarnings("ignore")
def test_what_the_model_reads_belongs_to_the_graph() -> None:
    graphed = Graphed(lora=True)
    graphed.model.set_adapter("one")
    graphed.check()
    before = graphed(make_inputs(1))
    for captures, (name, (change, back)) in enumerate(CHANGES.items(), 2):
        change(graphed.model)
        graphed.check()
        assert graphed.recorder.captures == captures, name
        assert name == "training" or not torch.equal(graphed(make_inputs(1)), before), name
        back(graphed.model)
        replays = graphed.recorder.replays
        assert torch.equal(graphed(make_inputs(1)), before), name
        assert (graphed.recorder.captures, graphed.recorder.replays) == (captures, replays + 1), "the first graph"


def test_a_weight_that_changes_in_place_needs_no_new_graph() -> None:
    graphed = Graphed()
    graphed.check()
    with torch.no_grad():
        graphed.model.proj_out.weight.mul_(2)
    graphed.check()
    assert graphed.recorder.captures == 1


def test_other_weights_drop_the_graphs() -> None:
    graphed = Graphed()
    layer = graphed.model.proj_out
    graphed.check()
    changes: tuple[Callable[[], object], ...] = (
        lambda: setattr(layer.weight, "data", layer.weight.data.clone() * 2),
        lambda: setattr(layer, "weight", nn.Parameter(layer.weight.detach() * 2)),
        lambda: graphed.model.add_adapter(LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False)),
    )
    for count, change in enumerate(changes, 1):
        assert not graphed.forward.must_drop()
        change()
        assert graphed.forward.must_drop()
        graphed.check()
        assert graphed.recorder.captures == count, "a rank does not capture alone"
        graphed.forward.drop()
        assert graphed.recorder.freed == count
        graphed.check()
        assert graphed.recorder.captures == count + 1


def _object(graphed: Graphed) -> Inputs:
    return make_inputs(1, attention_kwargs={"mine": object()})


def _hooked(graphed: Graphed) -> Inputs:
    graphed.model.blocks[1].register_forward_hook(lambda *_: None)
    return make_inputs(1)


def _cached(graphed: Graphed) -> Inputs:
    graphed.model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    return make_inputs(1)


def _with_forward(graphed: Graphed, forward: Callable[[Any, Tensor], Tensor]) -> Inputs:
    block = graphed.model.blocks[0]
    original = block.ffn.forward
    block.ffn.flip = False
    block.ffn.forward = lambda x: forward(block.ffn, original(x))
    return make_inputs(1)


def _flipping(graphed: Graphed) -> Inputs:
    def flip(module: Any, x: Tensor) -> Tensor:
        module.flip = not module.flip
        return x * 2 if module.flip else x

    return _with_forward(graphed, flip)


def _writing(graphed: Graphed) -> Inputs:
    inputs = make_inputs(1)
    return {**_with_forward(graphed, lambda _, x: x + inputs["hidden_states"].add_(0).sum() * 0), **inputs}


def _queue(graphed: Graphed) -> Inputs:
    graphed.model.blocks[0].ffn.queue = deque([1.0])
    return make_inputs(1)


def _on_another_device(graphed: Graphed) -> Inputs:
    graphed.recorder.device = torch.device("cuda", 0)
    return make_inputs(1)


REASONS: dict[str, Callable[[Graphed], Inputs]] = {
    r"attention_kwargs\['mine'\] is a object, which cannot be compared by value": _object,
    "a forward hook of blocks.1 runs Python code": _hooked,
    "decides in Python which blocks to compute": _cached,
    "its weights are not all on cuda:0": _on_another_device,
    "it changes blocks.0.ffn.flip of the model": _flipping,
    "it changes an argument": _writing,
    r"changes of blocks.0.ffn.queue \(deque\) could not be noticed": _queue,
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_cannot_be_captured_is_eager_and_logged_once(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    graphed = Graphed()
    inputs = REASONS[reason](graphed)
    contexts = graphed.model.cache_context("only") if hasattr(graphed.model, "cache_context") else None
    with contexts if contexts is not None else torch.no_grad():
        for _ in range(5):
            graphed(inputs)
    assert graphed.recorder.captures == 0
    texts = [record.getMessage() for record in caplog.records if "without CUDA graphs" in record.getMessage()]
    assert len(texts) == 1
    assert re.search(reason, texts[0])


def test_gradients_and_tangents_are_not_lost() -> None:
    graphed = Graphed()
    for _ in range(4):
        graphed.model(**make_inputs(1))[0].sum().backward()
    with torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        for _ in range(4):
            inputs = make_inputs(1)
            inputs["hidden_states"] = forward_ad.make_dual(inputs["hidden_states"], torch.ones(1, 4, 2, 6, 6))  # type: ignore[no-untyped-call]
            assert forward_ad.unpack_dual(graphed.model(**inputs)[0]).tangent is not None  # type: ignore[no-untyped-call]
    assert graphed.recorder.captures == 0


def test_values_that_always_change_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning_cp")
    graphed = Graphed()
    block = graphed.model.blocks[0]
    original = block.ffn.forward

    def counting(x: Tensor) -> Tensor:
        block.ffn.count = getattr(block.ffn, "count", 0) + 1
        return original(x) * block.ffn.count  # type: ignore[no-any-return]

    block.ffn.forward = counting
    results = [graphed(make_inputs(1)) for _ in range(12)]
    assert not any(torch.equal(x, y) for x, y in pairwise(results))
    assert "blocks.0.ffn.count of the model differs in each forward" in caplog.text
    assert graphed.recorder.captures == 0


def test_ever_new_values_do_not_fill_the_memory() -> None:
    graphed = Graphed()
    for number in range(70):
        graphed(make_inputs(1, attention_kwargs={"scale": float(number)}))
    assert graphed.recorder.captures == 0
    assert len(graphed.forward._entries) <= 64


def test_minus_zero_is_another_value_and_nan_is_one() -> None:
    graphed = Graphed()
    for value in ("0.0", "-0.0", "nan"):
        graphed.check(lambda seed, value=value: make_inputs(seed, attention_kwargs={"scale": float(value)}))
    assert graphed.recorder.captures == 3


def test_modes_and_global_hooks_run_in_each_forward() -> None:
    graphed, seen = Graphed(), list[object]()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        graphed.check(calls=5)
    finally:
        hook.remove()
    assert graphed.recorder.captures == 0
    assert seen


def test_the_least_recently_used_graph_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_MOST_GRAPHS", 2)
    graphed = Graphed()
    sizes = (4, 6, 8)
    for side in sizes:
        graphed.check(lambda seed, side=side: make_inputs(seed, side=side))
    assert (graphed.forward.num_graphs, graphed.recorder.freed) == (2, 1)
    replays = graphed.recorder.replays
    graphed(make_inputs(1, side=8))
    graphed(make_inputs(1, side=6))
    assert graphed.recorder.replays == replays + 2
    graphed.check(lambda seed: make_inputs(seed, side=4))
    assert graphed.recorder.captures == 4


def test_memory_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    graphed = Graphed()
    graphed.recorder.num_bytes = 600  # of 8,000: at most 1,000 for graphs
    for side in (4, 6):
        graphed.check(lambda seed, side=side: make_inputs(seed, side=side))
    assert (graphed.forward.num_graphs, graphed.forward.num_bytes) == (1, 600)
    graphed.recorder.num_bytes = 1001
    graphed.check(lambda seed: make_inputs(seed, side=8))
    assert graphed.forward.num_graphs == 1
    assert "more than" in caplog.text


def test_a_forward_that_cannot_be_captured_stays_eager(caplog: pytest.LogCaptureFixture) -> None:
    graphed = Graphed()
    graphed.recorder.fails = RuntimeError("operation not permitted when stream is capturing")
    graphed.check()
    graphed.recorder.fails = None
    graphed.check()
    assert graphed.recorder.captures == 0
    assert caplog.text.count("RuntimeError: operation not permitted when stream is capturing") == 1


@pytest.mark.parametrize(("share", "captures"), [(1.0, 1), (0.9, 1), (0.8, 0), (None, 0)])
def test_auto_captures_where_the_host_is_the_limit(share: float | None, captures: int, caplog: Any) -> None:
    caplog.set_level("INFO", "lightning_cp")
    graphed = Graphed("auto")
    graphed.recorder.share = share
    graphed.check(calls=6)
    assert graphed.recorder.captures == captures
    assert caplog.text.count("forwards are captured" if captures else "forwards stay eager") == 1


def test_capture_forward_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = StandIn()
    monkeypatch.setattr("lightning_cp.engine.graphs.recorder.recorder_for", lambda _: recorder)
    model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match="Linear is not context-parallel: call apply_context_parallel first"):
        capture_forward(model)
    graphed = Graphed()
    graphed.undo()
    undo = capture_forward(graphed.model)
    for _ in range(4):
        graphed(make_inputs(1))
    assert (recorder.captures, recorder.replays) == (1, 2)
    undo()
    graphed(make_inputs(1))
    assert (recorder.replays, recorder.freed) == (2, 1)


def test_a_model_that_copies_its_lists_keeps_its_state() -> None:
    model = nn.Linear(2, 2)
    model.tables = [torch.ones(1), torch.ones(2)]  # type: ignore[assignment]
    state = ModelState(model)
    number = state.number
    model.tables = list(model.tables)  # type: ignore[assignment, arg-type]
    state.refresh()
    assert state.number == number
    model.tables[0] = torch.ones(1)  # type: ignore[index]
    state.refresh()
    assert state.number != number
