"""Write the model card of a fine-tuned model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_cp.checkpoint.folder import atomic_file
from lightning_cp.compat.versions import installed_version
from lightning_cp.export import LORA_FILE
from lightning_cp.finetune.adapters.lora_file import SECOND_EXPERT

CARD = "README.md"
_PACKAGES = ("lightning-cp", "torch", "diffusers", "lightning", "peft", "transformers")


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The model card of a fine-tuned model: how to use the model, and how it was trained.

    Args:
        base: pipeline that was fine-tuned: a folder, or an id on the Hub.
        family: name of the model family.
        command: command line of the training, on one line.
        steps: number of training steps.
        topology: for instance "data 2 × ring 2 × ulysses 1".
        samples: number of training samples.
        held_out: number of samples for validation.
        captions: number of distinct captions.
        sizes: number of samples by (frames, height, width).
        adapter: settings of the LoRA, such as {"rank": 16}; None if all weights were trained.
        component: name of the trained transformer in the pipeline.
        other_components: names of further experts that were trained with it.
        loads_adapters: True if the pipeline has `load_lora_weights`; False: its transformer loads them.
        is_modular: True if the base is a modular pipeline.
        losses: validation loss by step.
    """

    base: str
    family: str
    command: str
    steps: int
    topology: str
    samples: int
    held_out: int = 0
    captions: int = 0
    sizes: Mapping[tuple[int, int, int], int] = field(default_factory=dict)
    adapter: Mapping[str, object] | None = None
    component: str = "transformer"
    other_components: Sequence[str] = ()
    loads_adapters: bool = True
    is_modular: bool = False
    losses: Mapping[int, float] = field(default_factory=dict)

    def text(self) -> str:
        """Return the card in Markdown, with the metadata of the Hugging Face Hub at its top."""
        base = _shown(self.base)
        kind = "LoRA" if self.adapter is not None else "Fine-tuning"
        lines = [
            "---",
            f"base_model: {json.dumps(base)}",
            "library_name: diffusers",
            f"tags: {json.dumps(['diffusers', 'lightning_cp', self.family, *(['lora'] if self.adapter else [])])}",
            "---",
            "",
            f"# {kind} of {base}",
            "",
            f"Trained for {self.steps} steps on {self.samples} samples, {self.topology}, with:",
            "",
            "```bash",
            self.command,
            "```",
            "",
            *self._use(base),
            *_list(
                {
                    "model family": self.family,
                    "training samples": self.samples,
                    "held-out samples": self.held_out,
                    "distinct captions": self.captions,
                    **{f"samples of {f} × {h} × {w}": n for (f, h, w), n in sorted(self.sizes.items())},
                    **{f"lora {name}": value for name, value in (self.adapter or {}).items()},
                }
            ),
            *self._validation(),
            "",
            "## Versions",
            "",
            *_list({package: installed_version(package) for package in _PACKAGES}),
        ]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> Path:
        """Write the card as `README.md` of a folder, in place of an older one. Returns: its path."""
        path = folder / CARD
        with atomic_file(path) as scratch:
            scratch.write_text(self.text(), encoding="utf-8")
        return path

    def _use(self, base: str) -> list[str]:
        if self.adapter is None and self.component.startswith("transformer"):
            return []
        if self.adapter is None:
            return [
                "To use it in diffusers:",
                "",
                "```python",
                "from diffusers import AutoModel, DiffusionPipeline",
                "",
                'model = AutoModel.from_pretrained(".")  # the folder of this card',
                f"pipe = DiffusionPipeline.from_pretrained({json.dumps(base)}, {self.component}=model)",
                "```",
                "",
            ]
        load = []
        for name in (self.component, *self.other_components):
            # load_lora_weights would load nothing of a second expert
            own = f'pipe.{name}.load_lora_adapter(folder, prefix="{name}", weight_name="{LORA_FILE}")'
            load.append(own if name == SECOND_EXPERT or not self.loads_adapters else "pipe.load_lora_weights(folder)")
        kind = "ModularPipeline" if self.is_modular else "DiffusionPipeline"
        return [
            "To use it in diffusers:",
            "",
            "```python",
            f"from diffusers import {kind}",
            "",
            f"pipe = {kind}.from_pretrained({json.dumps(base)})",
            *(["pipe.load_components()"] if self.is_modular else []),
            'folder = "."  # the folder of this card',
            *load,
            "```",
            "",
        ]

    def _validation(self) -> list[str]:
        known = {step: loss for step, loss in sorted(self.losses.items()) if math.isfinite(loss)}
        if not known:
            return []
        best = min(known, key=lambda step: known[step])
        rows = [f"| {step} | {loss:.6g}{' (best)' if step == best else ''} |" for step, loss in known.items()]
        return ["", "## Validation", "", "| step | val_loss |", "|---|---|", *rows]


def _list(values: Mapping[str, object]) -> list[str]:
    return [f"- {name}: {_shown(value)}" for name, value in values.items() if value is not None]


def _shown(value: object) -> str:
    shown = ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
    return " ".join(shown.split())  # one line
