"""Write the model card of a fine-tuned model."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from lightning_cp.checkpoint.folder import atomic_file
from lightning_cp.compat.versions import installed_version
from lightning_cp.export import LORA_FILE
from lightning_cp.finetune.adapters.lora_file import SECOND_EXPERT

CARD = "README.md"
# A name with one of these words has a secret as its value, in the command or inside of a value.
_WORDS = "token|key|password|passwd|passphrase|pass|pwd|secret|credential|auth|authorization|bearer"
_SECRET = rf"(?i:(?:^|[^a-z])(?:api|access)?(?:{_WORDS}))"
_SECRET_NAME = re.compile(rf"{_SECRET}s?(?:[^a-zA-Z]|$)")
_SECRET_VALUE = re.compile(rf"({_SECRET}[\"']?\s*[:=]\s*)(\"[^\"]*\"|'[^']*'|[^,}}\]\s]+)")
_HAS_NAMES = re.compile("[{:=?&]")  # a value that may have names with values of their own
_PLAIN = re.compile(r"[-+.\de]*|true|false|null", re.IGNORECASE)  # a number of tokens or keys, for example
_URL_LOGIN = re.compile(r"(\w://)[^/@\s]+@")
_OTHER_FOLDERS = re.compile(r"file:///(?:[^\s,'\"\]}/=:]*/)*|\b[A-Za-z]:\\(?:[^\\\s,'\"]*\\)*")
_ABSOLUTE_FOLDERS = re.compile(r"(?<![\w:/.~}-])(?:~|/)(?:[^\s,'\"\]}/=:]*/)+(?=[^\s/])")
_ONE_PATH = re.compile(r"(?:~|/)[^,:;=\[\]{}\"']*/[^,:;=\[\]{}\"']*")
_PACKAGES = ("lightning-cp", "torch", "diffusers", "lightning", "peft", "transformers")


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The model card of a fine-tuned model: how to use the model, and how it was trained.

    Args:
        base: pipeline that was fine-tuned: a folder, or an id on the Hub.
        family: name of the model family.
        command: command line of the training. The card has no values of tokens, keys and passwords, and only the names
            of absolute paths.
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
        base, command = _shown(public_text(self.base)), public_command(self.command)
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
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
            f"{fence}bash",
            command,
            fence,
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
        """Return how to load the adapter or the ControlNet with diffusers."""
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
    return " ".join(public_text(shown).split())  # one line


def public_command(command: str) -> str:
    """Return a command without secrets and the folders of absolute paths, on one line."""
    try:
        words = shlex.split(command)
    except ValueError:  # not the syntax of a shell
        return " ".join(public_text(command).split())
    options = ["", *words[:-1]]  # `--token abc`
    return shlex.join(
        "***" if option.startswith("-") and "=" not in option and _SECRET_NAME.search(option) else _public_word(word)
        for option, word in zip(options, words, strict=True)
    )


def _public_word(word: str) -> str:
    name, equals, value = word.partition("=")
    is_secret = _SECRET_NAME.search(name) and not _PLAIN.fullmatch(value)
    if equals and (is_secret or (_HAS_NAMES.search(value) and _SECRET_NAME.search(value))):
        return f"{name}=***"
    path = value if equals else word
    if _ONE_PATH.fullmatch(path):  # it may have spaces
        return f"{name}{equals}{PurePath(path).name}" if equals else PurePath(path).name
    return " ".join(public_text(word).splitlines())


def public_text(text: str) -> str:
    """Return text without the values of secrets, without logins of URLs, and without the folders of absolute paths."""
    text = _OTHER_FOLDERS.sub("", text)
    return _ABSOLUTE_FOLDERS.sub("", _URL_LOGIN.sub(r"\1***@", _SECRET_VALUE.sub(r"\1***", text)))
