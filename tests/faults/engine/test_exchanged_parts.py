"""Models with parts that are exchanged after `apply_context_parallel`: followed exactly, or refused by name.

Each change is made to a parallel model and to one that runs alone; outputs and every parameter's gradient must agree.
Until each forward compared the model with what the plan was installed on, most of this was silently wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from lightning_cp.engine.apply import installed_on
from lightning_cp.errors import PlanError
from lightning_cp.plans import registered_plan
from tests.dist.compare import averaged, outcome, worst
from tests.dist.engine.test_engine_features import _with_lora
from tests.harness import RankPool
from tests.models import TINY

_EXACT = 1e-9


def config_of(mode: str, world: int) -> ContextParallelConfig:
    """The whole world around one ring, or as one Ulysses group."""
    return ContextParallelConfig(**{"ring": {"ring_degree": world}, "ulysses": {"ulysses_degree": world}}[mode])


def _blocks(model: nn.Module) -> nn.ModuleList:
    """The first list of blocks that the plan names."""
    plan: Any = registered_plan(type(model))
    blocks = model.get_submodule(next(iter(plan.blocks)).partition("[")[0])
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def _attentions(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, x) for name, x in module.named_modules() if getattr(x, "processor", None) is not None)


def _one_processor(model: nn.Module, donor: nn.Module) -> None:
    name, attention = list(_attentions(_blocks(model)[0]))[-1]
    attention.set_processor(_blocks(donor)[0].get_submodule(name).processor)


def _first_processor(model: nn.Module, donor: nn.Module) -> None:
    name, attention = next(_attentions(_blocks(model)[0]))
    attention.set_processor(_blocks(donor)[0].get_submodule(name).processor)


def _every_processor(model: nn.Module, donor: nn.Module) -> None:
    for name, attention in _attentions(model):
        attention.set_processor(donor.get_submodule(name).processor)


def _processor_of_ours(model: nn.Module, donor: nn.Module) -> None:
    _, attention = next(_attentions(_blocks(model)[0]))
    attention.set_processor(type(attention.processor)())


def _other_attention(model: nn.Module, donor: nn.Module) -> None:
    name, _ = next(_attentions(_blocks(model)[0]))
    parent, _, child = name.rpartition(".")
    setattr(_blocks(model)[0].get_submodule(parent), child, _blocks(donor)[0].get_submodule(name))


def _exchanged(model: nn.Module, donor: nn.Module) -> None:
    _blocks(model)[0] = _blocks(donor)[0]


def _appended(model: nn.Module, donor: nn.Module) -> None:
    _blocks(model).append(copy.deepcopy(_blocks(donor)[1]))


def _dropped(model: nn.Module, donor: nn.Module) -> None:
    del _blocks(model)[-1]


def _reordered(model: nn.Module, donor: nn.Module) -> None:
    blocks = _blocks(model)
    blocks[-1], blocks[-2] = blocks[-2], blocks[-1]


_CHANGES: dict[str, Callable[[nn.Module, nn.Module], None]] = {
    "one processor": _one_processor,
    "first processor": _first_processor,
    "processor of our class": _processor_of_ours,
    "every processor": _every_processor,
    "another attention": _other_attention,
    "exchanged": _exchanged,
    "appended": _appended,
    "dropped": _dropped,
    "reordered": _reordered,
}


def change_model(model: nn.Module, change: str, donor: nn.Module) -> None:
    """Carry out one of the changes."""
    _CHANGES[change](model, donor)


def donor_of(name: str) -> nn.Module:
    """A model of the same class with other weights."""
    donor = TINY[name].build()
    with torch.no_grad():
        for parameter in donor.parameters():
            parameter.mul_(1.1)
    return donor


def _followed(rank: int, world: int, name: str, mode: str, change: str) -> tuple[float, float, bool]:
    """Errors of output and gradients, and whether the model is that of one process without the plan."""
    tiny = TINY[name]
    single, arguments = tiny.build(), tiny.arguments()
    change_model(single, change, donor_of(name))
    expected, gradients = outcome(single, arguments)
    model = tiny.build()
    apply_context_parallel(model, config_of(mode, world))
    outcome(model, arguments)
    change_model(model, change, donor_of(name))
    out, found = outcome(model, arguments)
    errors = float((out - expected).abs().max()), worst(averaged(found, world), gradients)
    remove_context_parallel(model)
    return *errors, torch.equal(outcome(model, arguments)[0], expected)


# The first four have several attentions in a block, so that one of them may be missed while others are met.
@pytest.mark.parametrize(
    ("name", "mode", "change"),
    [
        ("sd3", "ring", "one processor"),
        ("ltx2", "ulysses", "first processor"),
        ("kandinsky6", "ring", "every processor"),
        ("motif_video", "ulysses", "processor of our class"),
        ("flux", "ring", "appended"),
    ],
)
@pytest.mark.default(1)
def test_processors_and_new_blocks_are_followed_exactly(run_ranks: RankPool, name: str, mode: str, change: str) -> None:
    for output, gradient, is_back in run_ranks(3, _followed, name, mode, change):
        assert output < _EXACT
        assert gradient < _EXACT
        assert is_back


def _copied(rank: int, world: int, name: str, mode: str, how: str) -> tuple[float, float]:
    """A deep copy of a parallel model, which trains with checkpoints or a LoRA as the original does."""
    tiny = TINY[name]
    single, arguments = tiny.build(), tiny.arguments()
    original = tiny.build()
    apply_context_parallel(original, config_of(mode, world))
    model = copy.deepcopy(original)
    for one in (single, model):
        if how == "reentrant":
            one.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=True))
        elif how == "lora":
            _with_lora(one)
        one.train(how == "reentrant")
    expected, gradients = outcome(single, arguments)
    del original
    out, found = outcome(model, arguments)
    return float((out - expected).abs().max()), worst(averaged(found, world), gradients)


@pytest.mark.parametrize(("name", "mode", "how"), [("wan", "ulysses", "reentrant"), ("flux", "ring", "lora")])
@pytest.mark.default(1)
def test_deep_copies_train_as_the_original_does(run_ranks: RankPool, name: str, mode: str, how: str) -> None:
    for output, gradient in run_ranks(3, _copied, name, mode, how):
        assert output < _EXACT
        assert gradient < 1e-5 if how == "reentrant" else gradient < _EXACT  # replays cast to float32


def _by_diffusers(rank: int, world: int) -> tuple[list[float], bool]:
    """Changes by diffusers' own methods: projections fused and separate again, processors saved and set back."""
    model, arguments = TINY["flux"].build(), TINY["flux"].arguments()
    expected, _ = outcome(model, arguments)
    theirs = dict(model.attn_processors)
    apply_context_parallel(model, config_of("ring", world))
    ours = dict(model.attn_processors)
    errors = []
    for change in (
        lambda: model.fuse_qkv_projections(),
        lambda: model.unfuse_qkv_projections(),
        lambda: model.set_attn_processor(dict(theirs)),
        lambda: model.set_attn_processor(dict(ours)),
    ):
        change()
        out, _ = outcome(model, arguments)
        errors.append(float((out - expected).abs().max()))
    remove_context_parallel(model)
    return errors, all(model.attn_processors[name] is processor for name, processor in theirs.items())


def test_what_diffusers_methods_change_is_followed(run_ranks: RankPool) -> None:
    for errors, is_back in run_ranks(3, _by_diffusers):
        assert max(errors) < _EXACT
        assert is_back


def _rebuilt_by(how: str, model: Any) -> None:
    """Rebuild a Wan by hand. The keys of `_REBUILT` are the names."""
    attention = model.blocks[1].attn1
    if how == "no attention":
        attention.set_processor(lambda attn, hidden_states, *args, **kwargs: hidden_states)
    elif how == "class":
        attention.__class__ = type("Attention", (type(attention),), {})
    elif how == "other block":
        model.blocks[0] = nn.Linear(4, 4)
    elif how == "gone":
        del model.proj_out
    else:
        change_model(model, how, donor_of("wan"))


_REBUILT = {
    "no attention": "blocks.1.attn1.processor is a function, which makes no attention call",
    "class": "blocks.1.attn1 has another class",
    "other block": "blocks",
    "gone": "proj_out",
    "another attention": "blocks.0.attn1 is another module",
    "exchanged": "blocks.0 is another module",
    "dropped": "is gone, or no longer attends",
    "reordered": "blocks.0 is another module",
}


def _refused(rank: int, world: int) -> dict[str, str]:
    messages = {}
    for how in _REBUILT:
        model, arguments = TINY["wan"].build(), TINY["wan"].arguments()
        apply_context_parallel(model, config_of("ring", world))
        model(**arguments)
        _rebuilt_by(how, model)
        for _ in range(2):  # it stays refused
            with pytest.raises(PlanError) as caught:
                model(**arguments)
        messages[how] = str(caught.value)
        assert installed_on(model) is not None
        remove_context_parallel(model)
    apply_context_parallel(model, config_of("ring", world))  # the last one fits again
    model(**arguments)
    return messages


def test_a_model_rebuilt_by_hand_needs_its_plan_again(run_ranks: RankPool) -> None:
    for messages in run_ranks(2, _refused):
        for how, said in _REBUILT.items():
            assert said in messages[how]
            assert "Apply the plan again" in messages[how]
