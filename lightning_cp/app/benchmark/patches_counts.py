"""Count what PipeFusion holds and sends for models of real size, on tensors without storage (device `meta`).

    python -m lightning_cp.app.benchmark.patches_counts [MODEL …]

MODEL is a key of MODELS; without one, all are counted. For each number of devices it prints the weights, the buffered
keys and values, and the sent bytes of the device with the most, for one evaluation of one branch of guidance. The
counts come from a forward of the model in patches, the formulas from Fang et al., arXiv:2405.14430.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_cp.comm.shards import shard_range
from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.apply import parallelize
from lightning_cp.engine.meta import default_dtype
from lightning_cp.engine.paths import submodule
from lightning_cp.nest import tensors
from lightning_cp.pipelines.pipefusion.patches import PatchEvaluation
from lightning_cp.pipelines.pipefusion.stages import blocks_of
from lightning_cp.planning.models import MediaSize, PlannedModel, diffusers_model, of_dtype

DEVICES = (2, 4, 8)
_PATCHES = 4  # neither the buffers nor the sent bytes depend on it
_BFLOAT16_BYTES = 2


@dataclass(frozen=True)
class Size:
    """A model's size in attention: tokens that it buffers, blocks, and channels of its tokens."""

    tokens: int
    blocks: int
    channels: int

    @property
    def one_tensor(self) -> int:
        """Bytes of all tokens, in bfloat16: p x hs of the formulas."""
        return self.tokens * self.channels * _BFLOAT16_BYTES


@dataclass(frozen=True)
class ByteCounts:
    """Bytes that one evaluation holds and sends.

    Attributes:
        weights, buffers, outputs: for each block, its weights, its buffered keys and values, and its outputs over all
            patches, which the last block of a stage sends.
        other_weights: weights outside of the blocks, which every stage holds.
    """

    weights: list[int]
    buffers: list[int]
    outputs: list[int]
    other_weights: int

    def largest(self, stages: int) -> tuple[int, int, int]:
        """Return the weights, the buffers and the bytes sent to the next stage, each of the stage with the most."""
        divided = [shard_range(len(self.weights), stages, stage) for stage in range(stages)]
        return (
            self.other_weights + max(sum(self.weights[i] for i in blocks) for blocks in divided),
            max(sum(self.buffers[i] for i in blocks) for blocks in divided),
            max(self.outputs[blocks.stop - 1] for blocks in divided[:-1]),
        )


def count_patches(model: nn.Module, arguments: dict[str, Any], patches: int = _PATCHES) -> ByteCounts:
    """Evaluate a model of device `meta` whole and in patches, and count.

    Args: arguments: arguments of `model.forward`, on the meta device. The model is made parallel over one rank.
    """
    installed = parallelize(model, ContextParallelConfig(), check_peers="off")
    assert installed.model_plan.patches is not None, f"{type(model).__name__} cannot be computed in patches"
    blocks = [submodule(model, path) for path in blocks_of(installed)]
    key_bytes, outputs = [0] * len(blocks), [0] * len(blocks)
    evaluation = PatchEvaluation.of(installed.session, patches)

    def buffer_bytes() -> int:
        return sum(_bytes(buffer.tensors) for buffer in evaluation.buffers)

    def before_block(index: int) -> None:
        key_bytes[index] -= buffer_bytes()

    def after_block(index: int, output: object) -> None:
        key_bytes[index] += buffer_bytes()
        if evaluation.patch is not None:
            outputs[index] += _bytes(tensors(output))

    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, index=index: before_block(index))
        block.register_forward_hook(lambda _, __, output, index=index: after_block(index, output))
    with installed.session.evaluating(evaluation), torch.no_grad():
        for forward in (None, *range(patches)):
            evaluation.begin(forward)
            model(**arguments)
    weights = [_bytes(block.parameters()) for block in blocks]
    return ByteCounts(weights, key_bytes, outputs, _bytes(model.parameters()) - sum(weights))


def table(counts: ByteCounts, size: Size) -> list[str]:
    """Return rows in Markdown: counts and formulas, for each number of devices."""
    head = ["devices", "weights, GB", "keys and values, GB", "2 p hs L / N", "sent, MB", "p hs"]
    head += ["Ulysses: 4 p hs L / N", "ring: 2 p hs L"]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    all_blocks = size.one_tensor * size.blocks
    for devices in (n for n in DEVICES if n <= size.blocks):
        weights, buffers, sent = counts.largest(devices)
        in_gb = [weights, buffers, 2 * all_blocks / devices]
        in_mb = [sent, size.one_tensor, 4 * all_blocks / devices, 2 * all_blocks]
        cells = [f"{x / 1e9:.2f}" for x in in_gb] + [f"{x / 1e6:,.1f}" for x in in_mb]
        rows.append(f"| {devices} | {' | '.join(cells)} |")
    return rows


def flux() -> tuple[nn.Module, dict[str, Any], Size]:
    """FLUX.1-dev for a picture of 1024 x 1024 pixels, with 512 text tokens."""
    planned = diffusers_model("FluxTransformer2DModel", {"guidance_embeds": True}, MediaSize(1024, 1024, text=512))
    return _on_meta(planned), of_dtype(planned.inputs, torch.bfloat16), Size(4096 + 512, 57, 3072)


def wan() -> tuple[nn.Module, dict[str, Any], Size]:
    """Wan 2.1 14B for a clip of 81 frames of 720 x 1280 pixels: cross-attention to text is not buffered."""
    planned = diffusers_model("WanTransformer3DModel", {}, MediaSize(720, 1280, 81, text=512))
    return _on_meta(planned), of_dtype(planned.inputs, torch.bfloat16), Size(21 * 45 * 80, 40, 5120)


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any], Size]]] = {"flux": flux, "wan": wan}


def _on_meta(planned: PlannedModel) -> nn.Module:
    with default_dtype(torch.bfloat16), torch.device("meta"):
        return planned.build().eval()


def _bytes(tensors: Any) -> int:
    return sum(x.nbytes for x in tensors)


def main() -> None:
    """Print the tables."""
    for name in sys.argv[1:] or MODELS:
        model, arguments, size = MODELS[name]()
        print(f"\n{MODELS[name].__doc__}\n")
        print("\n".join(table(count_patches(model, {**arguments, "return_dict": False}), size)))


if __name__ == "__main__":
    main()
