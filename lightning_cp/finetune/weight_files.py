"""Find and check the safetensors files of one model in a pipeline's folder. No weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_cp.files import check_regular, read_json, why_not_regular
from lightning_cp.pipeline_folder import PIPELINE_INDEX, find_pipeline, index_file

SINGLE_FILE = "diffusion_pytorch_model.safetensors"
INDEX_FILE = "diffusion_pytorch_model.safetensors.index.json"


@dataclass(frozen=True)
class WeightFiles:
    """Safetensors files of one model.

    Attributes:
        folder: folder that holds them.
        files: file of each tensor, by the tensor's name.
        shapes: shape of each tensor, by name.
    """

    folder: Path
    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def by_file(self) -> dict[Path, list[str]]:
        """Names of the tensors in each file."""
        names_by_file: dict[Path, list[str]] = {}
        for name, path in self.files.items():
            names_by_file.setdefault(path, []).append(name)
        return names_by_file


def local_pipeline(source: str | Path, component: str, *, setting: str) -> Path:
    """Return the folder of a pipeline. From the Hub, only the safetensors files of one component are downloaded.

    Args:
        source: folder, or id on the Hub.
        component: name of the component.
        setting: name of the setting that holds `source`, for error messages.
    Raises: ValueError: it is no pipeline, or cannot be downloaded.
    """
    wanted = ("config.json", SINGLE_FILE, INDEX_FILE, "diffusion_pytorch_model-*.safetensors")
    folder = find_pipeline(source, *(f"{component}/{name}" for name in wanted), setting=setting)
    if index_file(folder) is None:
        is_model = (folder / "config.json").is_file()
        hint = "it holds one model, so use its parent folder" if is_model else "use a folder saved by save_pretrained"
        raise ValueError(f"{setting}={source} is not a pipeline, because it has no {PIPELINE_INDEX}: {hint}")
    return folder


def find_weights(folder: Path) -> WeightFiles:
    """Find a model's safetensors files, and read their headers.

    Raises: ValueError: a file is missing or damaged, or there are only pickle files.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise ValueError(f"{index} is damaged: it has no valid weight_map. Download or copy the pipeline again")
        files = {name: folder / Path(file).name for name, file in names.items()}
    elif (folder / SINGLE_FILE).is_file():
        files = dict.fromkeys(_header(folder / SINGLE_FILE), folder / SINGLE_FILE)
    else:
        raise ValueError(_without_weights(folder))
    headers: dict[Path, dict[str, tuple[int, ...]]] = {}
    for path in dict.fromkeys(files.values()):
        if not path.is_file():
            raise ValueError(f"{path} is missing, but {INDEX_FILE} lists it. Download or copy the pipeline again")
        headers[path] = _header(path)
    for name, path in files.items():
        if name not in headers[path]:
            raise ValueError(f"{path} has no tensor {name}, but {INDEX_FILE} lists it. Download the pipeline again")
    unlisted = {name: path for path, header in headers.items() for name in header if name not in files}
    files = {**files, **unlisted}  # the caller decides about names that the model does not have
    return WeightFiles(folder, files, {name: headers[path][name] for name, path in files.items()})


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Read names and shapes. Raises: ValueError: the file is damaged; safetensors compares its length, too."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or incomplete ({error}). Download or copy it again") from None


def _without_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} has its weights in pickle files only ({pickles[0]}), which can run code: convert them with "
            "save_pretrained(..., safe_serialization=True), or use a copy with safetensors files"
        )
    variants = sorted(path.name for path in folder.glob("*.safetensors"))
    variant_files = f", only {', '.join(variants[:3])}" if variants else ""
    for file in (folder / SINGLE_FILE, folder / INDEX_FILE):
        if file.exists():
            return f"{file} {why_not_regular(file)}, but must be a file"
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{variant_files}"
