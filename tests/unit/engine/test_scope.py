"""Stand-ins of attention functions are inert without a scope, and scopes are those of the running module and thread."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from lightning_cp.engine.attention import stand_ins
from lightning_cp.engine.attention.scope import SCOPE
from lightning_cp.engine.attention.stand_ins import are_installed
from lightning_cp.errors import PlanError
from lightning_cp.plans import LOCAL, Attention, Plan, split
from tests.dist.compare import outcome
from tests.models.wan import wan

PLAN = Plan(
    {"blocks": {"x": split(1, "image")}},
    {"proj_out": split(1, "image")},
    attention={"local": LOCAL, "other": ("image",)},
)
NAMES = ("scaled_dot_product_attention", "dropout", "alpha_dropout")


def attend(x: Tensor) -> Tensor:
    """Self-attention of one head without weights."""
    out: Tensor = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
    return out


class Attends(nn.Module):
    """Attends, and calls `probe`."""

    def __init__(self, probe: Callable[[str], None], name: str) -> None:
        super().__init__()
        self.probe, self.name, self.drop = partial(probe, name), name, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.probe()
        return attend(x)


class Block(Attends):
    """Holds an attention of its own kind, a LOCAL one, and code of no kind of its own."""

    def __init__(self, probe: Callable[[str], None]) -> None:
        super().__init__(probe, "block")
        self.local, self.other, self.linear = Attends(probe, "local"), Attends(probe, "other"), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) + self.local(x)
        self.probe()
        x = x + self.other(x)
        self.probe()
        out: Tensor = self.linear(x)
        return out


class Model(nn.Module):
    """Two blocks and a projection."""

    def __init__(self, probe: Callable[[str], None] = lambda name: None) -> None:
        super().__init__()
        self.probe = partial(probe, "model")
        self.around: Callable[[Any, Tensor], Tensor] = lambda block, x: block(x)
        self.blocks, self.proj_out = nn.ModuleList([Block(probe), Block(probe)]), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            self.probe()
            x = self.around(block, x)
        self.probe()
        out: Tensor = self.proj_out(x)
        return out


class Plain(nn.Module):
    """Attention and dropout, as in a text encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.drop(attend(self.linear(x))), 0.1, self.training)
        return x + torch.dropout(x, 0.2, self.training)


class Recomputed(torch.autograd.Function):
    """Checkpointing of a module by other code than PyTorch's. Its backward calls the module with the same tensor."""

    @staticmethod
    def forward(ctx: Any, block: Any, x: Tensor) -> Tensor:
        ctx.block, ctx.x = block, x
        out: Tensor = block(x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            return None, torch.autograd.grad(ctx.block(ctx.x), ctx.x, gradients)[0]


@pytest.fixture(autouse=True)
def _is_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stand_ins, "_USERS", WeakSet())
    stand_ins.release_stand_ins(monkeypatch)  # models of other tests may be alive
    before = [getattr(F, name) for name in NAMES]
    yield
    assert SCOPE.current is None
    assert SCOPE.entry is None
    assert [getattr(F, name) for name in NAMES] == before


def _x() -> Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))


def _seen(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    out: Tensor = model(x)
    return out


def test_a_model_without_a_plan_is_the_same_bit_for_bit() -> None:
    torch.manual_seed(0)
    plain, x = Plain(), _x()
    expected = _seen(plain, x)
    model = Model()
    apply_context_parallel(model, ContextParallelConfig(), PLAN)
    model(x)
    assert torch.equal(_seen(plain, x), expected)
    remove_context_parallel(model)
    assert torch.equal(_seen(plain, x), expected)


def _graph(model: nn.Module, x: Tensor) -> list[tuple[str, object, str]]:
    """Compile a model; return the operators of its graph, and their arguments."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    seen: list[tuple[str, object, str]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        counter(graph, inputs)
        made = make_fx(graph)(*inputs)
        seen.extend((node.op, node.target, str(node.args)) for node in made.graph.nodes)
        return graph

    torch.compile(model, backend=backend, fullgraph=True)(x)
    assert counter.frame_count == 1
    return seen


def test_a_model_without_a_plan_has_the_same_graph() -> None:
    torch.manual_seed(0)
    plain, x = Plain().eval(), _x()
    expected = _graph(plain, x)
    model = Model()
    apply_context_parallel(model, ContextParallelConfig(), PLAN)
    model(x)
    assert _graph(plain, x) == expected
    remove_context_parallel(model)


def test_the_last_remove_restores_the_functions() -> None:
    functions = [getattr(F, name) for name in NAMES]
    models = [Model(), Model()]
    for model in models:
        apply_context_parallel(model, ContextParallelConfig(), PLAN)
        assert are_installed()
    assert all(getattr(F, name) is not x for name, x in zip(NAMES, functions, strict=True))
    remove_context_parallel(models[0])
    assert are_installed()
    remove_context_parallel(models[1])
    assert all(getattr(F, name) is x for name, x in zip(NAMES, functions, strict=True))


def test_a_plan_that_does_not_fit_restores_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        assert are_installed()
        raise PlanError("blocks")

    monkeypatch.setattr("lightning_cp.engine.installed.install", fails)
    with pytest.raises(PlanError, match="blocks"):
        apply_context_parallel(Model(), ContextParallelConfig(), PLAN)
    assert not are_installed()


def test_names_of_other_modules_are_exchanged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("of_a_user")
    module.__dict__["sdpa"] = F.scaled_dot_product_attention
    monkeypatch.setitem(sys.modules, "of_a_user", module)
    original, model = F.scaled_dot_product_attention, Model()
    apply_context_parallel(model, ContextParallelConfig(), PLAN)
    assert module.sdpa is F.scaled_dot_product_attention is not original
    remove_context_parallel(model)
    assert module.sdpa is F.scaled_dot_product_attention is original


def test_a_function_that_is_replaced_later_gets_a_stand_in() -> None:
    calls = []

    def users(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return original(*args, **kwargs)

    original, model = F.scaled_dot_product_attention, Model()
    apply_context_parallel(model, ContextParallelConfig(), PLAN)
    stand_in = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = users
    model(_x())
    assert are_installed()
    assert len(calls) == 2  # the LOCAL ones
    F.scaled_dot_product_attention = stand_in  # as `mock.patch` does
    model(_x())
    assert len(calls) == 2
    remove_context_parallel(model)
    assert F.scaled_dot_product_attention is original


def test_functions_are_pickled_by_name() -> None:
    model = Model()
    apply_context_parallel(model, ContextParallelConfig(), PLAN)
    for name in NAMES:
        assert pickle.loads(pickle.dumps(getattr(F, name))) is getattr(F, name)
    remove_context_parallel(model)


def in_script(x: Tensor) -> Tensor:
    """Attention and dropouts for TorchScript."""
    x = F.dropout(F.scaled_dot_product_attention(x, x, x), 0.3, False)
    return F.alpha_dropout(torch.dropout(x, 0.2, False), 0.2, False)


def test_torchscript_compiles_the_original_functions() -> None:
    x, model = _x(), Model()
    expected = in_script(x)
    apply_context_parallel(model, ContextParallelConfig(), PLAN)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.* is deprecated")
        scripted = torch.jit.script(in_script)
        drop = torch.jit.script(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)).eval())
    assert torch.equal(scripted(x), expected)
    drop(x)
    remove_context_parallel(model)
    assert torch.equal(scripted(x), expected)


def test_a_class_may_have_a_function_as_an_attribute() -> None:
    """PyTorch's function is not bound to an object."""
    model, x = Model(), _x()
    apply_context_parallel(model, ContextParallelConfig(), PLAN)
    late = type("Late", (), {"attention": F.scaled_dot_product_attention})()
    installed = late.attention(x, x, x)
    remove_context_parallel(model)
    assert torch.equal(installed, F.scaled_dot_product_attention(x, x, x))
    assert torch.equal(installed, late.attention(x, x, x))


@pytest.mark.parametrize("around", [partial(checkpoint, use_reentrant=False), Recomputed.apply])
def test_a_recomputation_inside_of_another_model_leaves_its_scope(around: Any) -> None:
    """A block of the outer model runs the backward of another parallel model."""
    inner, seen = Model(), []

    def probe(name: str) -> None:
        before = SCOPE.current
        if name == "block":
            inner(_x().requires_grad_()).sum().backward()
        seen.append(SCOPE.current is before)

    inner.around = around
    outer = Model(probe)
    for model in (inner, outer):
        apply_context_parallel(model, ContextParallelConfig(), PLAN)
    outer(_x())
    assert seen == [True] * len(FORWARD)
    for model in (inner, outer):
        remove_context_parallel(model)


def _kind(found: Any) -> object:
    """A short form of a scope: kinds of attention, or the class of what computes it, and whether dropout differs."""
    if found is None:
        return None
    kinds = getattr(found.attention, "kinds", None)
    return kinds or type(found.attention).__name__, found.drops


def _probed(model_of: Callable[[Callable[[str], None]], Any], run: Callable[[Any], object]) -> list[tuple[str, object]]:
    """Run a parallel model, and list the scopes that its modules have seen."""
    seen: list[tuple[str, object]] = []
    model = model_of(lambda name: seen.append((name, _kind(SCOPE.current))))
    apply_context_parallel(model, ContextParallelConfig(), PLAN)
    run(model)
    remove_context_parallel(model)
    return seen


OUTSIDE, LOCALLY = ("UnplannedAttention", False), ("NoneType", True)
IMAGE = ((Attention(("image",)),), True)
BLOCK = [("block", IMAGE), ("local", LOCALLY), ("block", IMAGE), ("other", IMAGE), ("block", IMAGE)]
FORWARD = [("model", OUTSIDE), *BLOCK, ("model", OUTSIDE), *BLOCK, ("model", OUTSIDE)]


def test_each_module_has_its_scope() -> None:
    assert _probed(Model, lambda model: model(_x())) == FORWARD


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_has_the_scopes_of_the_forward(reentrant: bool) -> None:
    def run(model: Any) -> None:
        model.around = partial(checkpoint, use_reentrant=reentrant)
        model.gradient_checkpointing = reentrant
        if reentrant:
            model._gradient_checkpointing_func = partial(checkpoint, use_reentrant=True)
            model.around = lambda block, x: model._gradient_checkpointing_func(block, x)
        model(_x().requires_grad_()).sum().backward()
        assert SCOPE.current is None

    class Checkpoints(Model):
        gradient_checkpointing = reentrant

    assert _probed(Checkpoints, run) == [*FORWARD, *BLOCK, *BLOCK]


def test_recomputation_in_a_thread_of_autograd_has_the_scopes_of_the_forward() -> None:
    """As on GPUs, where autograd has a thread for each device."""

    def run(model: Any) -> None:
        model.around = partial(checkpoint, use_reentrant=False)
        out = model(_x().requires_grad_()).sum()
        thread = threading.Thread(target=out.backward)
        thread.start()
        thread.join()

    assert _probed(Model, run) == [*FORWARD, *BLOCK, *BLOCK]


@pytest.mark.parametrize("around", [partial(checkpoint, use_reentrant=False), Recomputed.apply])
def test_an_interrupted_recomputation_leaves_other_models_alone(around: Any) -> None:
    def interrupts(name: str) -> None:
        if failing and name == "other":
            raise KeyboardInterrupt

    failing: list[bool] = []
    torch.manual_seed(0)
    plain, x = Plain(), _x()
    expected = _seen(plain, x)
    model = Model(interrupts)
    apply_context_parallel(model, ContextParallelConfig(), PLAN)
    model.around = around
    out = model(x.clone().requires_grad_())
    failing.append(True)
    with pytest.raises(KeyboardInterrupt):
        out.sum().backward()
    assert (SCOPE.current is None) == isinstance(around, partial)  # PyTorch's functions restore it
    assert torch.equal(_seen(plain, x), expected)
    assert SCOPE.current is None
    remove_context_parallel(model)


def test_an_error_leaves_no_scope() -> None:
    """Also in recomputation: Ctrl-C may leave the scope there, until the next forward."""
    for error, fails in product((RuntimeError, KeyboardInterrupt), ("model", "block", "local", "other")):
        _fail(error, fails)


def _fail(error: type[BaseException], fails: str) -> None:

    def raises(name: str) -> None:
        if name == fails and failing:
            raise error

    failing: list[bool] = [True]
    model = Model(raises)
    apply_context_parallel(model, ContextParallelConfig(), PLAN)
    with pytest.raises(error):
        model(_x())
    assert SCOPE.current is None
    failing.clear()
    model.around = partial(checkpoint, use_reentrant=False)
    out = model(_x().requires_grad_())
    if fails != "model":
        failing.append(True)
        with pytest.raises(error):
            out.sum().backward()
        assert SCOPE.current is None or error is KeyboardInterrupt
        failing.clear()
    model(_x()).sum().backward()
    remove_context_parallel(model)


def test_a_thread_has_its_own_scope() -> None:
    """A plain model runs in another thread while a block of a parallel model runs in this one."""
    torch.manual_seed(0)
    plain, x, seen = Plain(), _x(), []
    expected = _seen(plain.eval(), x)

    def other() -> None:
        seen.append((SCOPE.current, torch.equal(_seen(plain, x), expected)))

    def probe(name: str) -> None:
        assert SCOPE.current is not None
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    model = Model(probe)
    apply_context_parallel(model, ContextParallelConfig(), PLAN)
    model(x)
    remove_context_parallel(model)
    assert seen == [(None, True)] * len(FORWARD)


def test_models_inside_a_model_have_their_own_scopes() -> None:
    seen: list[tuple[str, Any]] = []

    class Outer(Model):
        def __init__(self) -> None:
            super().__init__(lambda name: seen.append((f"outer {name}", SCOPE.current)))
            first: Any = self.blocks[0]
            first.inner = [inner]  # not a submodule

    def around(block: Any, x: Tensor) -> Tensor:
        x = block(x)
        return block.inner[0](x) if hasattr(block, "inner") else x

    inner = Model(lambda name: seen.append((f"inner {name}", SCOPE.current)))
    apply_context_parallel(inner, ContextParallelConfig(), PLAN)
    outer = Outer()
    apply_context_parallel(outer, ContextParallelConfig(), PLAN)
    outer.around = around
    outer(_x())
    sessions = {name.split()[0]: {x.session for key, x in seen if key.startswith(name.split()[0])} for name, _ in seen}
    assert {name: len(x) for name, x in sessions.items()} == {"outer": 1, "inner": 1}
    assert sessions["outer"] != sessions["inner"]
    for model in (inner, outer):
        remove_context_parallel(model)


def test_a_processor_that_two_models_share_is_plain_in_a_model_without_a_plan() -> None:
    models: list[Any] = [wan().build(), wan().build()]
    arguments = wan().arguments()
    models[1].blocks[0].attn1.processor = models[0].blocks[0].attn1.processor
    expected = [outcome(model, arguments)[0] for model in models]
    apply_context_parallel(models[0], ContextParallelConfig(), models[0]._cp_plan)
    assert models[0].blocks[0].attn1.processor._parallel_config is not None
    assert torch.equal(outcome(models[1], arguments)[0], expected[1])
    assert (outcome(models[0], arguments)[0] - expected[0]).abs().max() < 1e-12
    remove_context_parallel(models[0])
    assert models[0].blocks[0].attn1.processor._parallel_config is None
    assert torch.equal(outcome(models[0], arguments)[0], expected[0])


def test_a_copy_uses_the_stand_ins_after_its_original_was_removed() -> None:
    seen: list[Any] = []
    model = Model(lambda name: seen.append(_kind(SCOPE.current)))
    apply_context_parallel(model, ContextParallelConfig(), PLAN)
    copied = copy.deepcopy(model)
    remove_context_parallel(model)
    assert not are_installed()
    copied(_x())
    assert are_installed()
    remove_context_parallel(copied)
