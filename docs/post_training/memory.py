"""Print the memory of a rollout and of a training step for each ring degree, counted without a GPU.

    python docs/post_training/memory.py model=wan_14b frames=17

`model` is a name in conf/plan/models.yaml; `frames`, `height`, `width`, `batch_size`, `lora.rank`, `precision` and the
other settings are those of recipes/plan.py.
"""

import sys

from hydra import compose, initialize_config_dir

from lightning_cp.planning.dry_run import dry_run
from lightning_cp.planning.models import of_dtype
from lightning_cp.planning.recording import StepSettings
from lightning_cp.planning.step import Layout
from lightning_cp.recipes.planning.settings import request_of
from lightning_cp.recipes.runs.command import conf_dir

RINGS = (1, 2, 4)
KEPT = ("weights", "gradients", "optimizer")


def main(arguments: list[str]) -> None:
    """Print the table. Args: arguments: overrides of the settings of recipes/plan.py."""
    with initialize_config_dir(conf_dir("plan"), version_base="1.3"):
        request = request_of(compose("plan", ["gpu.name=h100", "precision=bf16-true", "lora.rank=16", *arguments]))
    model = request.model
    print(f"{model.name}, {model.tokens} tokens, LoRA, GB of one rank")
    print("| ring | weights | rollout: forward | training: forward and backward, all blocks recomputed |")
    print("|---|---|---|---|")
    for sharded in (False, True):
        for ring in RINGS if not sharded else RINGS[1:]:
            layout = Layout(ring=ring, sharded=sharded, checkpointing="full")
            peaks = []
            for task in ("sample", "train"):
                step = dry_run(
                    model.build,
                    of_dtype(model.inputs, request.dtype),
                    layout,
                    StepSettings(task, request.autocast),
                    device=request.device.profile(),
                    dtype=request.dtype,
                    lora=request.lora,
                )
                kept = sum(step.peak[name] for name in KEPT)
                peaks.append(f"{step.peak_bytes / 1e9:.1f} (activations {(step.peak_bytes - kept) / 1e9:.1f})")
            weights = "sharded" if sharded else "replicated"
            print(f"| {ring} | {weights} | {' | '.join(peaks)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
