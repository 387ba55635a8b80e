"""Models in patches against an independent reference, step by step: plain models, dense attention, token indices.

The reference runs the whole plain model for each patch. Its attention keeps keys and values of all tokens, and replaces
those of the patch's tokens. Of the result only the patch's tokens are used, so the engine's splitting plays no part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.engine.check import KeepFloat64
from lightning_cp.engine.installed import installed_on
from lightning_cp.pipelines.pipefusion.patches import PatchEvaluation
from tests.models import TINY

PATCHES, STEPS = 3, 4


def _bounds(length: int) -> list[tuple[int, int]]:
    """Start and end of each patch: longer patches first."""
    sizes = [length // PATCHES + (i < length % PATCHES) for i in range(PATCHES)]
    return [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(PATCHES)]


@dataclass
class Reference:
    """Attention of all tokens, with stored keys for the tokens of other patches.

    Attributes:
        lengths: tokens of each modality, in the order of attention. patch: index of the patch; None: all tokens.
    """

    lengths: tuple[int, ...]
    patch: int | None = None
    stored: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    calls: int = 0

    def tokens(self) -> Tensor:
        """Indices of the current patch's tokens."""
        if self.patch is None:
            return torch.arange(sum(self.lengths))
        found, start = [], 0
        for length in self.lengths:
            first, last = _bounds(length)[self.patch]
            found.append(torch.arange(start + first, start + last))
            start += length
        return torch.cat(found)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Replace diffusers' dispatcher; tensors are [b, s, h, d]."""
        if key.shape[1] != sum(self.lengths):  # cross-attention to text
            keys, values = key, value
        else:
            if self.calls == len(self.stored):
                self.stored.append((key.clone(), value.clone()))
            keys, values = self.stored[self.calls]
            keys[:, self.tokens()], values[:, self.tokens()] = key[:, self.tokens()], value[:, self.tokens()]
            self.calls += 1
        q, k, v = (x.transpose(1, 2) for x in (query, keys, values))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _run(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    with KeepFloat64(), torch.no_grad():
        found: Tensor = model(**arguments, return_dict=False)[0]
    return found


def _reference(evaluate: Callable[[Tensor], Tensor], reference: Reference, start: Tensor, rows: Any) -> list[Tensor]:
    """Return the latents after each step."""
    x, found = start, []
    for step in range(STEPS):
        reference.patch, reference.calls = None, 0
        if step == 0:
            out = evaluate(x)
        else:
            out = torch.empty_like(start)
            for patch in range(PATCHES):
                reference.patch, reference.calls = patch, 0
                rows(out, patch)[:] = rows(evaluate(x), patch)
        x = x - 0.3 * out
        found.append(x)
    return found


def _ours(model: nn.Module, arguments: dict[str, Any], order: tuple[str, ...]) -> list[Tensor]:
    apply_context_parallel(model, ContextParallelConfig())
    installed = installed_on(model)
    assert installed is not None
    evaluation = PatchEvaluation(installed.session, PATCHES, order)
    x, found = arguments["hidden_states"], []
    for step in range(STEPS):
        for patch in (None,) if step == 0 else range(PATCHES):
            evaluation.begin(patch)
            with installed.session.evaluating(evaluation):
                out = _run(model, {**arguments, "hidden_states": x})
        x = x - 0.3 * out
        found.append(x)
    return found


def _errors(name: str, expected: list[Tensor], order: tuple[str, ...]) -> tuple[float, float]:
    """The largest error, and the difference from whole evaluations: patches are not exact."""
    arguments = TINY[name].arguments()
    pairs = zip(expected, _ours(TINY[name].build(), arguments, order), strict=True)
    error = max(float((a - b).abs().max()) for a, b in pairs)
    plain = arguments["hidden_states"]
    for _ in range(STEPS):
        plain = plain - 0.3 * _run(TINY[name].build(), {**arguments, "hidden_states": plain})
    return error, float((plain - expected[-1]).abs().max())


def test_flux_in_patches_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.transformers import transformer_flux

    model, arguments = TINY["flux"].build(), TINY["flux"].arguments()
    reference = Reference((arguments["encoder_hidden_states"].shape[1], arguments["hidden_states"].shape[1]))

    def rows(out: Tensor, patch: int) -> Tensor:
        return out[:, slice(*_bounds(out.shape[1])[patch])]

    with monkeypatch.context() as context:
        context.setattr(transformer_flux, "dispatch_attention_fn", reference.attend)
        expected = _reference(
            lambda x: _run(model, {**arguments, "hidden_states": x}), reference, arguments["hidden_states"], rows
        )
    error, difference = _errors("flux", expected, ("text", "image"))
    assert error < 1e-12 < 1e-6 < difference


def test_wan_in_patches_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.transformers import transformer_wan

    model, arguments = TINY["wan"].build(), TINY["wan"].arguments()
    start, (pt, ph, pw) = arguments["hidden_states"], TINY["wan"].config.get("patch_size", (1, 2, 2))
    _, _, t, h, w = start.shape
    tokens = (t // pt) * (h // ph) * (w // pw)
    reference = Reference((tokens,))

    def rows(out: Tensor, patch: int) -> Tensor:
        """Pixels of a patch's tokens, as a view [tokens, pixels]."""
        grid = out.unflatten(4, (w // pw, pw)).unflatten(3, (h // ph, ph)).unflatten(2, (t // pt, pt))
        by_token = grid.permute(2, 4, 6, 0, 1, 3, 5, 7)
        return _Rows(by_token, range(*_bounds(tokens)[patch]))  # type: ignore[return-value]

    with monkeypatch.context() as context:
        context.setattr(transformer_wan, "dispatch_attention_fn", reference.attend)
        expected = _reference(lambda x: _run(model, {**arguments, "hidden_states": x}), reference, start, rows)
    error, difference = _errors("wan", expected, ("image",))
    assert error < 1e-12 < 1e-6 < difference


@dataclass
class KeptRows:
    """A tensor that is kept between evaluations. The evaluation of a patch replaces the rows of this patch only.

    Attributes: rows: number of rows. dim: dim of the tensor with the rows, or with their tokens.
    """

    reference: Reference
    rows: int
    dim: int
    kept: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = x.clone()
        patch, tokens = self.reference.patch, x.shape[self.dim] // self.rows
        first, last = (0, self.rows) if patch is None else _bounds(self.rows)[patch]
        start, length = first * tokens, (last - first) * tokens
        self.kept.narrow(self.dim, start, length).copy_(x.narrow(self.dim, start, length))
        return self.kept.clone()


@pytest.mark.parametrize(("name", "convolution"), [("sana", "conv_depth"), ("sana_video", "conv_temp")])
@pytest.mark.default(1)
def test_sana_in_patches_is_the_reference(name: str, convolution: str) -> None:
    """Linear attention keeps keys and values; the convolution between rows (or frames) keeps its input."""
    model, arguments = TINY[name].build(), TINY[name].arguments()
    start = arguments["hidden_states"]
    reference, number = Reference(()), start.shape[2]
    for block in model.transformer_blocks:
        for layer in (block.attn1.to_k, block.attn1.to_v):
            keys = KeptRows(reference, number, 1)
            layer.register_forward_hook(lambda module, args, output, keys=keys: keys(output))
        rows = KeptRows(reference, number, 2)
        layer = getattr(block.ff, convolution)
        layer.register_forward_pre_hook(lambda module, args, rows=rows: (rows(args[0]),))

    def rows_of(out: Tensor, patch: int) -> Tensor:
        return out[:, :, slice(*_bounds(number)[patch])]

    expected = _reference(lambda x: _run(model, {**arguments, "hidden_states": x}), reference, start, rows_of)
    error, difference = _errors(name, expected, ("image",))
    assert error < 1e-12 < 1e-6 < difference


@dataclass
class _Rows:
    """Some tokens of a tensor [frames, rows, columns, ...], for assignment."""

    grid: Tensor
    chosen: range

    def __setitem__(self, key: slice, value: _Rows) -> None:
        for index in self.chosen:
            frame, rest = divmod(index, self.grid.shape[1] * self.grid.shape[2])
            row, column = divmod(rest, self.grid.shape[2])
            self.grid[frame, row, column] = value.grid[frame, row, column]
