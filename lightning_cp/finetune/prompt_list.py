"""Read the prompts of samples during training: texts, some with settings of their own, in a list or a file.

Imports neither torch nor diffusers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_cp.files import read_regular, why_not_regular
from lightning_cp.rules import Integer

_SET_BY_SAMPLER = ("control_image", "generator", "output_type", "return_dict")
_SIZES = ("height", "width", "num_frames")  # arguments that leave the number of forwards as it is
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class SamplePrompt:
    """A prompt with its settings.

    Args:
        prompt: text to draw.
        seed: seed of its noise; None: the number of the prompt is added to the sampler's seed.
        image: picture file: the source of an edit, the first frame of a clip, or the control of a ControlNet.
        call: other arguments of the pipeline's call, such as `height` and `negative_prompt`.
    """

    prompt: str
    seed: int | None = None
    image: Path | None = None
    call: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The prompt and its settings on one line, without the folders of files."""
        settings = {"seed": self.seed, "image": self.image and self.image.name, **self.call}
        listed = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
        return f"{self.prompt} ({listed})" if listed else self.prompt


def sample_prompts_of(prompts: Any, *, setting: str = "prompts") -> list[SamplePrompt]:
    """Return the prompts of a list or a file.

    Args:
        prompts: a list of texts, or of mappings with `prompt` and optionally `seed`, `image` and arguments of the
            pipeline's call; or the path of a file: YAML or JSON with such a list, or a .txt file with a text on each
            line. Paths of pictures in a file are relative to its folder.
        setting: name of the setting, for error messages.
    Raises: ValueError: there are none, an entry is not valid, or a file does not exist.
    """
    folder, entries = Path(), prompts
    if isinstance(prompts, (str, Path)):
        folder, entries = Path(prompts).parent, _read(Path(prompts), setting)
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ValueError(
            f"{setting}={prompts} is not valid: must be a list such as [a red fox], or a file with one text per line "
            "(.txt) or with a list (.yaml, .json)"
        )
    return [_entry(entry, folder, f"{setting}: entry {i}") for i, entry in enumerate(entries, 1)]


def have_equal_work(prompts: Sequence[SamplePrompt]) -> bool:
    """Return whether the pipeline calls the transformer equally often for all prompts."""
    calls = [
        {name: name == "negative_prompt" or value for name, value in one.call.items() if name not in _SIZES}
        for one in prompts
    ]
    return all(call == calls[0] for call in calls)


def _read(path: Path, setting: str) -> Any:
    if not path.is_file():
        raise ValueError(f"{setting}={path} is not valid, because it {why_not_regular(path)}: must be a list or a file")
    try:
        text = read_regular(path, limit_bytes=_MAX_BYTES).decode("utf-8-sig")
        return [line for line in text.splitlines() if line.strip()] if path.suffix == ".txt" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{setting}={path} cannot be read: {' '.join(str(error).split())[:300]}") from None


def _entry(entry: Any, folder: Path, where: str) -> SamplePrompt:
    values = {"prompt": entry} if isinstance(entry, str) else entry
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ValueError(
            f"{where} is {entry!r:.100}: must be a text, or settings such as {{prompt: a red fox, seed: 1}}"
        )
    call = dict(values)
    prompt, seed, image = call.pop("prompt", None), call.pop("seed", None), call.pop("image", None)
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"{where} has prompt={prompt!r:.100}: must be a text (a number needs quotes)")
    if seed is not None and not Integer(0, (1 << 63) - 1).passes(seed):
        raise ValueError(f"{where} has seed={seed!r:.100}: must be a whole number of at least 0")
    if reserved := [name for name in _SET_BY_SAMPLER if name in call]:
        raise ValueError(f"{where} has {reserved[0]}, which is set for each sample: leave it out")
    if image is None:
        return SamplePrompt(prompt.strip(), seed, None, call)
    if not isinstance(image, (str, Path)) or not (folder / image).is_file():
        state = why_not_regular(folder / image) if isinstance(image, (str, Path)) else "is no path"
        raise ValueError(f"{where} has image={image!s:.200}, which {state}: must be a picture file")
    return SamplePrompt(prompt.strip(), seed, folder / image, call)
