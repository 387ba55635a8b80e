"""Quantise a frozen transformer for a LoRA on top of it, whole or sharded over ranks.

A quantised weight is a matrix of bytes, one row for each row of the weight: its values, and the scale of each block of
values. A row needs no other, so FSDP2 shards the matrix by rows like a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from typing_extensions import override

from lightning_cp.finetune.host_weights import named_blocks

_SCALE = torch.float32
_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_INT8_MAX = 127.0


@dataclass(frozen=True)
class _Format:
    """How values are stored.

    Args:
        block: number of values in a row that share a scale; None: the whole row.
        encode: values in [-1, 1], as bytes.
        decode: the values of bytes; its second argument is `table`, on their device.
        per_byte: number of values in a byte.
        table: values by code, for `decode`; None: it computes them.
    """

    block: int | None
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, Tensor | None], Tensor]
    per_byte: int = 1
    table: Tensor | None = None


def _normal_levels() -> Tensor:
    """Return the 16 values of NF4: quantiles of the normal distribution, with 0, -1 and 1 (arXiv:2305.14314)."""
    ends = NormalDist().inv_cdf
    last = (1 - 1 / 30 + 1 - 1 / 32) / 2  # so that both halves end at the same distance from 0
    upper = [ends(0.5 + (last - 0.5) * i / 8) for i in range(1, 9)]
    lower = [-ends(0.5 + (last - 0.5) * i / 7) for i in range(7, 0, -1)]
    return torch.tensor([*lower, 0.0, *upper], dtype=torch.float64).div(upper[-1]).float()


_LEVELS = _normal_levels()


def _encode_nf4(x: Tensor) -> Tensor:
    middles = ((_LEVELS[1:] + _LEVELS[:-1]) / 2).to(x.device)
    codes = torch.bucketize(x, middles).to(torch.uint8)
    return codes[..., ::2] << 4 | codes[..., 1::2]


def _decode_nf4(codes: Tensor, pairs: Tensor | None) -> Tensor:
    assert pairs is not None, "the table of NF4"
    return pairs[codes.int()].flatten(-2)


def _encode_int8(x: Tensor) -> Tensor:
    return (x * _INT8_MAX).round().to(torch.int8).view(torch.uint8)


def _decode_int8(codes: Tensor, _: Tensor | None) -> Tensor:
    return codes.view(torch.int8).float() / _INT8_MAX


def _encode_fp8(x: Tensor) -> Tensor:
    return (x * _FP8_MAX).to(_FP8).view(torch.uint8)


def _decode_fp8(codes: Tensor, _: Tensor | None) -> Tensor:
    return codes.view(_FP8).float() / _FP8_MAX


_PAIRS = torch.stack((_LEVELS.repeat_interleave(16), _LEVELS.repeat(16)), dim=1)  # both values of each byte
FORMATS = {
    "int8": _Format(None, _encode_int8, _decode_int8),
    "fp8": _Format(None, _encode_fp8, _decode_fp8),
    "nf4": _Format(64, _encode_nf4, _decode_nf4, per_byte=2, table=_PAIRS),
}


def pack(weight: Tensor, weights: str) -> Tensor:
    """Quantise a matrix by rows: [rows, columns] -> [rows, bytes], uint8. Args: weights: a name in `FORMATS`."""
    layout = FORMATS[weights]
    block = layout.block or weight.shape[1]
    blocks = ceil(weight.shape[1] / block)
    values = pad(weight.float(), (0, blocks * block - weight.shape[1])).view(len(weight), blocks, block)
    scales = values.abs().amax(-1)
    codes = layout.encode(values / scales.clamp_min(torch.finfo(_SCALE).tiny)[..., None])
    return torch.cat((codes.flatten(1), scales.contiguous().view(torch.uint8)), dim=1)


def unpack(packed: Tensor, weights: str, columns: int, table: Tensor | None = None) -> Tensor:
    """Return the values of quantised rows: [rows, bytes] -> [rows, columns], float32.

    Args: table: table of the format, on the device of `packed`; None: it is copied there.
    """
    layout = FORMATS[weights]
    block = layout.block or columns
    blocks = ceil(columns / block)
    length = blocks * block // layout.per_byte
    if table is None and layout.table is not None:
        table = layout.table.to(packed.device)
    values = layout.decode(packed[:, :length].contiguous(), table).view(len(packed), blocks, block)
    scales = packed[:, length:].clone(memory_format=torch.contiguous_format).view(_SCALE)  # aligned
    return (values * scales[..., None]).flatten(1)[:, :columns]


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with a quantised weight; its values exist only while the layer computes.

    `weight` has the shape, the dtype and the device of the values, but none of them: a merge of adapters is an error.

    Args:
        layer: layer to take the place of, also on the meta device; then `packed` must be filled later.
        weights: a name in `FORMATS`.
    """

    def __init__(self, layer: nn.Linear, weights: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.weights = layer.in_features, layer.out_features, weights
        self.dtype = layer.weight.dtype
        self.packed = nn.Parameter(pack(layer.weight.detach(), weights), requires_grad=False)
        self.bias = layer.bias
        self._table = FORMATS[weights].table  # no buffer: it must not change its dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """NaN everywhere, in one element of memory: it cannot be changed in place."""
        nan = torch.full((), torch.nan, dtype=self.dtype, device=self.packed.device)
        return nan.expand(self.out_features, self.in_features)

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values of the weight, in the dtype of the layer or another. The weight must not be sharded."""
        return unpack(self.packed, self.weights, self.in_features).to(dtype or self.dtype)

    @override
    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype
        if dtype != self.dtype:
            input = input.to(dtype)
        if self._table is not None and self._table.device != input.device:
            self._table = self._table.to(input.device)  # once: the host waits for the copy
        bias = self.bias if self.bias is None else self.bias.to(dtype)
        layout = _Layout(self.weights, self.in_features, dtype)
        output: Tensor = _Linear.apply(input, self.packed, bias, self._table, layout)  # type: ignore[no-untyped-call]
        return output


class _Layout(NamedTuple):
    """How a layer's weight is stored, and the dtype of its values."""

    weights: str
    columns: int
    dtype: torch.dtype

    def values(self, packed: Tensor, table: Tensor | None) -> Tensor:
        return unpack(packed, self.weights, self.columns, table).to(self.dtype)


class _Linear(torch.autograd.Function):
    """A linear layer that keeps the quantised weight for backward, and computes its values again."""

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, table: Tensor | None, layout: _Layout
    ) -> Tensor:
        ctx.save_for_backward(packed, table)
        ctx.layout = layout
        return linear(x, layout.values(packed, table), bias)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] @ ctx.layout.values(*ctx.saved_tensors), None, None, None, None


def quantize_base(transformer: nn.Module, weights: str = "int8") -> None:
    """Quantise the weights of the linear layers in a transformer's blocks, in place. Call it before `add_lora`.

    The transformer may be on the meta device (`meta_transformer`): each rank then quantises its own rows of the files.

    Args: weights: "int8", "fp8" (a scale for each row), or "nf4" (4 bits, a scale for 64 values).
    Raises: ValueError: another kind of weights, or the transformer has adapters or no blocks with linear layers.
    """
    if weights not in FORMATS:
        raise ValueError(f"weights={weights!r} must be one of {', '.join(FORMATS)}")
    if getattr(transformer, "peft_config", None):
        raise ValueError(f"{type(transformer).__name__} has adapters: quantise it before add_lora")
    blocks = named_blocks(transformer).items()
    layers = [
        (name, x) for path, block in blocks for name, x in block.named_modules(prefix=path) if type(x) is nn.Linear
    ]
    if not layers:
        raise ValueError(f"{type(transformer).__name__} has no blocks with linear layers to quantise")
    for name, layer in layers:
        transformer.set_submodule(name, QuantizedLinear(layer, weights))


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """A quantised weight that is filled from the rows of a file.

    Args: layer: its layer, also sharded.
    """

    layer: QuantizedLinear

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight."""
        return torch.Size((self.layer.out_features, self.layer.in_features))

    def numel(self) -> int:
        """Return the number of values that there is memory for."""
        return self.shape.numel() if self.layer.packed.numel() else 0

    def fill(self, local: Tensor, rows: Tensor) -> None:
        """Quantise rows into the bytes of this rank."""
        local.copy_(pack(rows.to(local.device, self.layer.dtype), self.layer.weights))
