"""Find the layers that the settings of a LoRA name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from torch import nn

ALL_LINEAR = "all-linear"  # every linear layer, as in peft
DEFAULT, TEXT = "default", "text"  # in a list: the family's targets, and the layers of the text stream
_TEXT_QUERIES = "add_q_proj"  # only text has queries of its own: add_k_proj alone is for a picture (Wan)
_TEXT_ATTENTION = (_TEXT_QUERIES, "add_k_proj", "add_v_proj", "to_add_out")
_TEXT_MLP = re.compile(r"(.+\.)?(ff_context|txt_mlp)\..+")


def named_layers(
    targets: Sequence[str] | str, layers: Mapping[str, nn.Module], model: str, default: Sequence[str]
) -> list[str]:
    """Return the names of layers that the targets of the settings match, in the model's order.

    Args:
        targets: see `LoraSettings`; in a list, `DEFAULT` and `TEXT` have a meaning of their own.
        default: ends of names that `DEFAULT` stands for.
    Raises: ValueError: a target matches nothing.
    """
    if isinstance(targets, str) and targets not in (DEFAULT, TEXT):
        return matched_layers(targets, layers, model)
    listed = [targets] if isinstance(targets, str) else targets
    plain = [target for target in listed if target not in (DEFAULT, TEXT)]
    found = set(matched_layers(plain, layers, model)) if plain else set[str]()
    if DEFAULT in listed:
        found |= set(matched_layers(default, layers, model, every=False))
    if TEXT in listed:
        found |= _text_stream(layers, model)
    return [name for name in layers if name in found]


def _text_stream(layers: Mapping[str, nn.Module], model: str) -> set[str]:
    """Return the layers that only text goes through, in the blocks of a model with joint attention."""
    attention = [name.removesuffix(_TEXT_QUERIES) for name in layers if name.endswith(f".{_TEXT_QUERIES}")]
    found = {name for name in layers if any(name == f"{one}{end}" for one in attention for end in _TEXT_ATTENTION)}
    found |= {name for name in layers if _TEXT_MLP.fullmatch(name)}
    if not found:
        raise ValueError(f"lora.targets: {TEXT!r} matches no layer of {model}, which has no text stream of its own")
    return found


def matched_layers(
    targets: Sequence[str] | str,
    layers: Mapping[str, nn.Module],
    model: str,
    *,
    every: bool = True,
    setting: str = "lora.targets",
) -> list[str]:
    """Return the names of layers that targets match. Raises: ValueError: a target (`every`), or all, match nothing."""
    if targets == ALL_LINEAR:
        return [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    if isinstance(targets, str):
        matched = [name for name in layers if re.fullmatch(targets, name)]
        unmatched = [] if matched else [targets]
    else:
        by_target = {x: [name for name in layers if name == x or name.endswith(f".{x}")] for x in targets}
        matched = [name for name in layers if any(name in names for names in by_target.values())]
        unmatched = [x for x, names in by_target.items() if not names] if every or not matched else []
    if unmatched:
        ends = sorted({_end(name) for name in layers})
        close = difflib.get_close_matches(unmatched[0], ends, n=3, cutoff=0.4) or ends[:8]
        kind = "the regular expression " if isinstance(targets, str) else ""
        raise ValueError(
            f"{setting}: {kind}{unmatched[0]!r} matches no layer of {model}; the closest layers are "
            f"{', '.join(close)} (for example {next((n for n in layers if _end(n) == close[0]), '')})"
        )
    return matched


def ranks_of_layers(ranks: Mapping[str, int], names: Sequence[str], model: str) -> dict[str, int]:
    """Return the rank of each adapted layer that `ranks` names. Raises: ValueError: a name matches no adapted layer."""
    layers = dict.fromkeys(names, nn.Module())
    matched = {
        end: matched_layers([end], layers, f"{model} that lora.targets adapts", setting="lora.ranks") for end in ranks
    }
    return {name: ranks[end] for end, found in matched.items() for name in found}


def _end(name: str) -> str:
    """Return the end of a layer's name that lists of targets use: its last part, and the list that it is an item of."""
    parts = name.split(".")
    start = len(parts) - 1
    while start > 0 and parts[start].isdigit():
        start -= 1
    return ".".join(parts[start:])
