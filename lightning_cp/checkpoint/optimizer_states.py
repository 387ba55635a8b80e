"""Load the state of an optimizer of sharded weights, each parameter's state for this parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_cp.checkpoint.manifest import CheckpointError
from lightning_cp.compat.fabric_names import keeping_optimizers_without_state


def load_optimizer_state(
    module: nn.Module, optimizer: Optimizer, *, optim_state_dict: dict[str, Any], options: StateDictOptions
) -> None:
    """Load a state as `set_optimizer_state_dict` does, also one that was saved without sharding. Call it on every rank.

    Keys are names, or numbers of `torch.optim.Optimizer.state_dict`: number i is the i-th parameter of the parameter
    groups, as in `Optimizer.load_state_dict`. A parameter without a saved state gets none, because it had no gradient.

    Args: optim_state_dict: the state, equal on all ranks; tensors are whole, or sharded as here.
    Raises: CheckpointError: its parameter groups or shapes are not those of the optimizer.
    """
    with keeping_optimizers_without_state():
        here: dict[str, Any] = get_optimizer_state_dict(module, optimizer)
    names = [list(group["params"]) for group in here["param_groups"]]
    try:
        saved = _by_name(optim_state_dict, names, strict=options.strict)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"a saved optimizer state is damaged: {type(error).__name__}: {error}") from error
    if saved["state"]:
        started: dict[str, Any] = get_optimizer_state_dict(module, optimizer)  # torch starts a state
        _check_shapes(saved["state"], started["state"])
        for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=False):
            group.update({key: x for key, x in values.items() if key not in group})  # values of its first step
        set_optimizer_state_dict(module, optimizer, optim_state_dict=saved, options=replace(options, strict=False))
    else:  # SGD, or an optimizer that has not stepped
        optimizer.load_state_dict(saved)
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for name, parameter in zip(chain.from_iterable(names), parameters, strict=True):
        if name not in saved["state"]:
            optimizer.state.pop(parameter, None)


def _by_name(saved: dict[str, Any], names: list[list[str]], *, strict: bool) -> dict[str, Any]:
    """Return the saved state with names as keys. Raises: CheckpointError: it has other parameter groups.

    Args: names: names of the parameters in each parameter group here.
    """
    groups = saved["param_groups"]
    keys = [list(group["params"]) for group in groups]
    if any(isinstance(key, str) for key in chain.from_iterable(keys)):
        missing = sorted({*chain.from_iterable(names)}.difference(*keys))
        if missing and strict:
            raise CheckpointError(
                f"the saved optimizer had no parameter {missing[0]} ({len(missing)} are missing): create the optimizer "
                "with the parameters that it had, or load with strict=False"
            )
        return saved
    sizes, expected = [len(group) for group in keys], [len(group) for group in names]
    if sizes != expected:
        raise CheckpointError(
            f"the saved optimizer had parameter groups of {sizes} parameters, and this one has {expected}: create it "
            "with the same parameters, in the same order"
        )
    name_of = dict(zip(chain.from_iterable(keys), chain.from_iterable(names), strict=True))
    return {
        "state": {name_of[key]: state for key, state in saved["state"].items()},
        "param_groups": [{**group, "params": group_names} for group, group_names in zip(groups, names, strict=True)],
    }


def _check_shapes(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Compare the shapes of all states. Raises: CheckpointError: a saved one belongs to another parameter."""
    for name, state in saved.items():
        for key, x in state.items():
            other = here.get(name, {}).get(key)
            if isinstance(x, Tensor) and isinstance(other, Tensor) and x.shape != other.shape:
                raise CheckpointError(
                    f"the saved optimizer state {key} of {name} has shape {tuple(x.shape)}, and the optimizer here has "
                    f"{tuple(other.shape)}: create the optimizer with the same parameters, in the same order"
                )
