"""Attention in helper objects, partials, tables and lambdas that modules and processors hold is followed exactly."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from lightning_cp.engine.apply import parallelize
from lightning_cp.engine.attention.stand_ins import original_of
from lightning_cp.errors import InterceptionError
from lightning_cp.plans import LOCAL, Plan
from tests.dist.compare import averaged, outcome, worst
from tests.faults.engine.patched_parts import PLAN, model_of
from tests.harness import RankPool

_EXACT = 1e-9


def attend(x: Tensor, scale: float = 1.0) -> Tensor:
    """Self-attention of 4 heads without weights."""
    q = x.reshape(*x.shape[:2], 4, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(scale * q, q.flip(-1), q).transpose(1, 2).flatten(2)


def imported(x: Tensor) -> Tensor:
    """Attention under a name that is no global."""
    from torch.nn.functional import scaled_dot_product_attention as attention

    q = x.reshape(*x.shape[:2], 4, -1).transpose(1, 2)
    return attention(q, q.flip(-1), q).transpose(1, 2).flatten(2)


class Attends:
    """A helper that attends."""

    def __call__(self, x: Tensor) -> Tensor:
        return attend(x)

    def run(self, x: Tensor) -> Tensor:
        return attend(x)


class Nested:
    """A helper that holds another one."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        self.inner = inner

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def run(self, x: Tensor) -> Tensor:
        return self.inner(x)


def build() -> Any:
    """A model of one block, whose module and processor attend, and also call what they hold."""
    from diffusers.models.attention_processor import Attention

    class Helper:
        def __call__(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

        def run(self, x: Tensor) -> Tensor:
            return torch.sin(x)

    class Processor:
        def __init__(self) -> None:
            self.inner, self.function, self.scale = Helper(), torch.tanh, 1.0

        def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            x = attn.to_q(hidden_states)
            return self.attend(x) + self.inner(x) + self.inner.run(x) + self.function(x)

        def attend(self, x: Tensor) -> Tensor:
            return attend(x, self.scale)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(16, heads=4, dim_head=4, processor=Processor())
            self.helper, self.items, self.table = Nested(Helper()), [torch.tanh], {"a": torch.tanh}
            self.only_in_evaluation: Any = None

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(x) + self.helper(x) + self.items[0](x) + self.table["a"](x)
            if self.only_in_evaluation is not None and not self.training:
                x = self.only_in_evaluation(x)
            return x

    return model_of(Block, 1)


def _processor(block: Any) -> Any:
    return block.attention.processor


def _class(block: Any) -> None:
    block.helper.inner.__class__ = Attends


def _class_function(block: Any) -> None:
    type(_processor(block).inner).run = lambda self, x: attend(x)


def _attributes(block: Any) -> None:
    _processor(block).__dict__["inner"] = Attends()


CHANGES: dict[str, Callable[[Any], None]] = {
    "number of a processor": lambda block: setattr(_processor(block), "scale", 0.5),
    "function of a processor": lambda block: setattr(_processor(block), "function", attend),
    "bound method of a processor": lambda block: setattr(_processor(block), "function", Attends().run),
    "helper without attention": lambda block: setattr(block, "helper", torch.sin),
    "helper of a processor": lambda block: setattr(_processor(block), "inner", Attends()),
    "attributes of a processor": _attributes,
    "partial of a processor": lambda block: setattr(_processor(block), "function", partial(attend, scale=0.5)),
    "helper": lambda block: setattr(block, "helper", Attends()),
    "helper in a helper": lambda block: setattr(block.helper, "inner", Attends()),
    "class of a helper in a helper": _class,
    "function of a helper's class": _class_function,
    "item of a list": lambda block: block.items.__setitem__(0, attend),
    "entry of a table": lambda block: block.table.update(a=attend),
    "import in a function": lambda block: setattr(block, "helper", Nested(imported)),
    "lambda in a helper": lambda block: setattr(block, "helper", Nested(lambda x: Attends()(x))),
    "only in evaluation": lambda block: setattr(block, "only_in_evaluation", Nested(imported)),
}


def _arguments() -> dict[str, Any]:
    return {"x": torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def _run(rank: int, world: int, when: str, compiled: bool, names: list[str]) -> dict[str, tuple[float, float]]:
    """By change: errors of output and gradients."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)  # asked by the compiler
        return {name: _changed(world, when, compiled, name) for name in names}


def _changed(world: int, when: str, compiled: bool, name: str) -> tuple[float, float]:
    change = CHANGES[name]
    single, model, arguments = build(), build(), _arguments()
    theirs = _processor(model.blocks[0])
    before, _ = outcome(single, arguments)
    change(single.blocks[0])
    training = name != "only in evaluation"
    expected, gradients = outcome(single.train(training), arguments)
    assert not torch.equal(before, expected), name
    if when == "before":
        change(model.blocks[0])
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
    assert _processor(model.blocks[0]) is theirs
    if compiled:
        model.blocks[0].compile(backend="eager", fullgraph=True)
    if when != "before":
        outcome(model, arguments)
        change(model.blocks[0])
    out, found = outcome(model.train(training), arguments)
    remove_context_parallel(model)
    if not compiled:
        assert torch.equal(outcome(model, arguments)[0], expected), name
    return float((out - expected).abs().max()), worst(averaged(found, world), gradients)


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.full), "after"])
def test_attention_in_what_modules_hold_is_followed(run_ranks: RankPool, when: str) -> None:
    for found in run_ranks(3, _run, when, False, list(CHANGES), timeout_s=240):
        assert list(found) == list(CHANGES)
        assert not {name: x for name, x in found.items() if max(x) > _EXACT}


@pytest.mark.full
@pytest.mark.parametrize("when", ["before", "after"])
def test_attention_in_what_modules_of_compiled_blocks_hold_is_followed(run_ranks: RankPool, when: str) -> None:
    """But for the class of a helper: torch.compile itself does not notice that a function of it was replaced."""
    names = [name for name in CHANGES if (name, when) != ("function of a helper's class", "after")]
    for found in run_ranks(2, _run, when, True, names, timeout_s=240):
        assert not {name: x for name, x in found.items() if max(x) > _EXACT}


class Holds:
    """A helper that holds PyTorch's own function, from before a plan was applied."""

    def __init__(self) -> None:
        self.function = original_of(F.scaled_dot_product_attention)

    def __call__(self, x: Tensor) -> Tensor:
        q = x.reshape(*x.shape[:2], 4, -1).transpose(1, 2)
        return self.function(q, q.flip(-1), q).transpose(1, 2).flatten(2)


def _by_list(items: list[Any], x: Tensor) -> Tensor:
    q = x.reshape(*x.shape[:2], 4, -1).transpose(1, 2)
    out: Tensor = items[-1](q, q.flip(-1), 0.5 * q).transpose(1, 2).flatten(2)
    return out


def default(x: Tensor, function: Any = original_of(F.scaled_dot_product_attention)) -> Tensor:  # noqa: B008
    """Attention by PyTorch's own function, from before a plan was applied."""
    q = x.reshape(*x.shape[:2], 4, -1).transpose(1, 2)
    out: Tensor = function(q, q.flip(-1), q).transpose(1, 2).flatten(2)
    return out


def _held(rank: int, world: int, compiled: bool) -> float:
    """Error of a model that holds the function in attributes, lists and helpers; as a default, the call is refused."""
    single, model, arguments = build(), build(), _arguments()
    for one in (single, model):
        block = one.blocks[0]
        block.attention.processor.function = partial(Holds.__call__, block)
        block.function, block.helper.inner = original_of(F.scaled_dot_product_attention), Holds()
        block.items[0] = partial(_by_list, block.items)
        block.items.append(original_of(F.scaled_dot_product_attention))
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
    if compiled:
        model.blocks[0].compile(backend="eager", fullgraph=True)
    error = float((model(**arguments)[0] - single(**arguments)[0]).detach().abs().max())
    remove_context_parallel(model)
    original = original_of(F.scaled_dot_product_attention)  # models of earlier tests may be parallel
    assert model.blocks[0].function is original
    assert model.blocks[0].items[1] is original
    assert model.blocks[0].helper.inner.function is original
    if compiled:
        return error
    model.blocks[0].helper = default
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
    for _ in range(2):  # it stays refused
        with pytest.raises(InterceptionError, match=r"default in .* makes an attention call that could not be"):
            model(**arguments)
    return error


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_function_held_from_before_is_followed_or_refused(run_ranks: RankPool, compiled: bool) -> None:
    assert max(run_ranks(3, _held, compiled)) < _EXACT


def _allowed(rank: int, world: int) -> float:
    """Error of a model whose LOCAL module attends in a helper: on this rank's tokens, as the plan says."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.helper = Nested(imported)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.helper(x.reshape(-1, 2, x.shape[-1])).view_as(x)  # within pairs of tokens
            return out

    single, model = build(), build()
    for one in (single, model):
        one.blocks[0].helper = Local()
    plan = Plan(PLAN.blocks, PLAN.gather, attention={"helper": LOCAL})
    x = torch.randn(2, 4 * world, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parallelize(model, ContextParallelConfig(ring_degree=world), plan)
    with torch.no_grad():
        return float((model(x)[0] - single(x)[0]).abs().max())


def test_helpers_of_local_modules_may_attend(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _allowed)) < _EXACT
