"""Pad short texts to one token per rank and patch, for model classes that fail on an empty text shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp.engine.hook_base import EngineHook
from lightning_cp.engine.session import Session
from lightning_cp.plans import Pad


@dataclass(eq=False)
class PadHook(EngineHook):
    """Hook before the model: pads texts with fewer tokens than shards, and masks the padding."""

    session: Session
    signature: Any  # signature of the model's forward
    pads: Sequence[Pad]

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            bound = self.signature.bind(module, *args, **kwargs)
        except TypeError:
            return args, kwargs  # the forward itself raises the error
        arguments, changed = bound.arguments, False
        for pad in self.pads:
            tokens, mask = arguments.get(pad.tokens), arguments.get(pad.mask)
            shards = self.session.current().num_shards
            if not isinstance(tokens, Tensor) or not 0 <= tokens.shape[1] < shards:
                continue
            missing = shards - tokens.shape[1]
            if mask is None:
                mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
            arguments[pad.tokens] = F.pad(tokens, (0, 0, 0, missing))
            arguments[pad.mask] = F.pad(mask, (0, missing))
            changed = True
        return (bound.args[1:], bound.kwargs) if changed else (args, kwargs)
