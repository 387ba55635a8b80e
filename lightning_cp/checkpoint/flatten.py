"""Convert nested states to flat tensors and JSON, so that a checkpoint needs no pickle."""

from typing import Any

from torch import Tensor

_PLAIN = (str, int, float, bool, type(None))


def flatten_state(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Split nested dicts, lists, tuples, plain values and tensors into tensors by name and a JSON tree.

    Raises: TypeError: the state holds other objects. ValueError: two tensors would get the same name.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _flatten(state, "", tensors)


def unflatten_state(tensors: dict[str, Tensor], tree: Any) -> Any:
    """Rebuild the state that `flatten_state` split."""
    if not isinstance(tree, dict):
        return tree
    kind, value = next(iter(tree.items()))
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: unflatten_state(tensors, item) for key, item in value}
    items = [unflatten_state(tensors, item) for item in value]
    return tuple(items) if kind == "tuple" else items


def _flatten(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(state, Tensor):
        if name in tensors:  # for example {"a.b": x, "a": {"b": y}}
            raise ValueError(f"two tensors of the state would be saved as {name}: rename one of their keys")
        tensors[name] = state
        return {"tensor": name}
    if isinstance(state, dict):
        pairs = [(key, _flatten(value, f"{name}.{key}".lstrip("."), tensors)) for key, value in state.items()]
        if not all(isinstance(key, str | int) for key in state):
            raise TypeError(f"{name or 'state'} has keys that are neither strings nor integers")
        return {"dict": pairs}
    if isinstance(state, list | tuple):
        items = [_flatten(value, f"{name}.{i}".lstrip("."), tensors) for i, value in enumerate(state)]
        return {"tuple" if isinstance(state, tuple) else "list": items}
    if isinstance(state, _PLAIN):
        return state
    raise TypeError(
        f"{name or 'state'} is a {type(state).__name__}: must be a tensor, a dict, list or tuple, a string, a number, "
        "a bool or None"
    )
