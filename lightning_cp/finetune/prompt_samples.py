"""Draw pictures or clips from prompts with the transformer that is being trained, on the training mesh."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from lightning_cp.comm.agree import text_of
from lightning_cp.engine.apply import installed_on, parallelize
from lightning_cp.errors import FamilyError
from lightning_cp.finetune.encoders import pipeline_class, release
from lightning_cp.finetune.families.registry import family_class
from lightning_cp.finetune.media.images import read_image
from lightning_cp.finetune.pipeline import load_pipeline
from lightning_cp.finetune.prompt_list import have_equal_work, sample_prompts_of
from lightning_cp.finetune.side import called_by_pipeline, models_by_component, until_called
from lightning_cp.nest import replace, tensors
from lightning_cp.training.ranks import DataShard, Ranks, TrainerRanks
from lightning_cp.vae import parallelize_vae

_PIXELS: Any = (Image.Image, Tensor, np.ndarray)
_TRAINED = ("transformer", "controlnet")
_MARGIN = 1.2  # memory that an encoder needs, as a multiple of its weights


class RecordedPrompts:
    """Results of a pipeline's `encode_prompt`, on the CPU, by the arguments of the call.

    Args: then_called: components that the pipeline calls with these results (`Components.after_encode_prompt`). Their
        results are kept in place of those of `encode_prompt`, of which the first channel is kept to recognise them.
    """

    def __init__(self, then_called: Sequence[str] = ()) -> None:
        self._results: dict[str, Any] = {}
        self._then_called = tuple(then_called)

    @torch.no_grad()
    def record(self, pipe: Any, calls: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        """Call the pipeline with each call's arguments, up to the first call of a trained model, and keep the text.

        Args:
            pipe: pipeline with its text encoders and its VAE, on the CPU.
            device: device of this rank; they run there if its free memory allows, otherwise on the CPU.
        Raises: the exception of the pipeline, if it does not accept the arguments.
        """
        all_modules = {name: x for name, x in pipe.components.items() if isinstance(x, nn.Module)}
        transformers = [x for name, x in all_modules.items() if name.startswith(_TRAINED)]
        modules = [x for name, x in all_modules.items() if not name.startswith(_TRAINED)]  # the VAE encodes pictures
        at = device if _fits(modules, device) else torch.device("cpu")
        with ExitStack() as stack:
            for module in modules:
                module.to(at)
                stack.callback(module.to, "cpu")
            pipe.encode_prompt = self._recording(pipe.encode_prompt, at)
            stack.callback(pipe.__dict__.pop, "encode_prompt")
            for name in self._then_called:
                module = getattr(pipe, name)
                module.forward = self._recording_module(name, module.forward)
                stack.callback(module.__dict__.pop, "forward")
            for call in calls:
                with until_called(*transformers):  # the text is encoded then
                    pipe(**call, generator=torch.Generator().manual_seed(0), output_type="pt")

    def replay_in(self, pipe: Any, device: torch.device) -> None:
        """Make a pipeline's `encode_prompt` return the kept results, on a device."""

        def kept(key: str) -> Any:
            if key not in self._results:
                raise ValueError(f"{type(pipe).__name__}: a prompt was not encoded before its text encoders were freed")
            return replace(Tensor, lambda x: x.to(device), self._results[key])

        pipe.encode_prompt = lambda *args, **kwargs: kept(_key(args, kwargs))
        for name in self._then_called:  # not by setattr: pipelines accept models only
            pipe.__dict__[name] = lambda *args, _name=name, **kwargs: kept(_name + _key(_marks(args), _marks(kwargs)))

    def _recording(self, encode_prompt: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            result = encode_prompt(*args, **{**kwargs, "device": device})
            kept = _marks(result) if self._then_called else result
            self._results[_key(args, kwargs)] = replace(Tensor, lambda x: x.cpu(), kept)
            return replace(Tensor, lambda x: x.to(kwargs.get("device") or device), result)

        return record

    def _recording_module(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            device = next(tensors((args, kwargs))).device
            result = forward(*args, **kwargs)
            key = name + _key(_marks(args), _marks(kwargs))
            self._results[key] = replace(Tensor, lambda x: x.cpu(), result)
            return replace(Tensor, lambda x: x.to(device), result)

        return record


def _marks(values: Any) -> Any:
    """Keep the first channel of embeddings [b, length, channels], and all other values."""
    return replace(Tensor, lambda x: x[..., :1].clone() if x.dim() == 3 else x, values)


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    arguments = (args, sorted((name, x) for name, x in kwargs.items() if name != "device"))
    return repr(replace(_PIXELS, _digest, arguments))


def _digest(picture: Any) -> tuple[str, ...]:
    """Return the shape, the type and a hash of the values of a picture, tensor or array."""
    array = np.ascontiguousarray(picture.detach().cpu().float() if isinstance(picture, Tensor) else picture)
    return str(array.shape), str(array.dtype), hashlib.sha256(array.tobytes()).hexdigest()


def _fits(modules: Sequence[nn.Module], device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    needed = sum(x.numel() * x.element_size() for module in modules for x in module.parameters())
    return torch.cuda.mem_get_info(device)[0] > _MARGIN * needed


class PromptSampler:
    """Sample prompts with the pipeline around a transformer in training.

    The prompts are encoded once, by the first rank, and sent to the others; the text encoders are then freed. Each rank
    keeps the VAE, and of a pipeline with two experts the one that is not trained. The ranks of a context group draw the
    same samples together; the prompts are divided over the data groups (unless they need different numbers of
    forwards: then each group draws all). Sample i starts from noise of the seed `seed + i`, or its own, so it depends
    neither on the number of ranks nor on the step.

    It can be the `sample` of a `SamplingCallback` with a `FineTuning` module:

        sampler = PromptSampler("my-pipeline", ["a red fox"], height=512, width=512)
        SamplingCallback(sampler, every_n_train_steps=100, num_samples=len(sampler), value_range=(0, 1))

    Args:
        source: the pipeline's folder, or its id on the Hub.
        prompts: texts to draw, or mappings with a text and settings; or a file of them. See `sample_prompts_of`. Edit
            models, image to video and ControlNets need an `image` with each: the source, the first frame or the
            control.
        component: name of the model in training; not needed for `Experts`.
        seed: seed of the first sample, if it has none.
        setting: name of the setting that holds `source`, for error messages.
        call: other arguments of the pipeline's call, such as `height` and `num_inference_steps`.
    Raises: ValueError: no prompts, or one that is not valid, or arguments that are set here.
    """

    def __init__(
        self,
        source: str | Path,
        prompts: Sequence[str | Mapping[str, Any]] | str | Path,
        *,
        component: str = "transformer",
        seed: int = 0,
        setting: str = "model.pretrained",
        **call: Any,
    ) -> None:
        set_here = ("prompt", "image", "control_image", "generator", "output_type", "return_dict")
        reserved = [name for name in set_here if name in call]
        if reserved:
            raise ValueError(f"{reserved[0]} is set by PromptSampler: leave it out")
        self.prompts, self._source, self._component = sample_prompts_of(prompts), str(source), component
        self._pictures: list[Image.Image | None] = [None] * len(self.prompts)
        self._seed, self._setting, self._call = seed, setting, call
        self._pipe: Any = None
        self._model: nn.Module = nn.Identity()
        self._picture_name = "image"
        self._shard = DataShard(0, 1)

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.prompts)

    def __call__(self, module: Any, generator: torch.Generator) -> Tensor:
        """Draw this data rank's samples, for `SamplingCallback`. Args: module: with `transformer`, and a Trainer."""
        if self._pipe is None:
            self.prepare(module.transformer, TrainerRanks(module.trainer), DataShard.of(module.trainer.strategy))
        samples = self.draw()
        shapes = {tuple(x.shape) for x in samples}
        if len(shapes) > 1:
            raise ValueError(f"the prompts gave samples of different shapes {sorted(shapes)}: set height and width")
        return torch.stack(samples)

    def prepare(self, transformer: nn.Module, ranks: Ranks, data_shard: DataShard) -> None:
        """Load the pipeline around the transformer, and encode the prompts. Call it on every rank, once.

        Args: transformer: the model in training, a `SteeredTransformer` or the `Experts` of a pipeline, on its device,
            context-parallel or not, also sharded.
        Raises, on every rank: ValueError: the pipeline cannot be loaded, or refuses the arguments.
        """
        kind = pipeline_class(self._source)
        for i, prompt in enumerate(self.prompts, 1):
            where = f"sampling.prompts: entry {i} has"
            _check_call(kind, prompt.call, where)
            _check_picture(kind, where, has_image=prompt.image is not None)
        _check_call(kind, self._call, "sampling.call has")
        family, model = family_class(kind), cast(Any, transformer)
        components, self._picture_name = family.components, family.picture
        models = models_by_component(transformer, self._component)
        dtype: torch.dtype = model.dtype
        names, text = components.text, RecordedPrompts(components.after_encode_prompt)
        failure, pipe = "", None
        if ranks.is_global_zero:
            try:
                self._pictures = [None if x.image is None else _picture(x.image) for x in self.prompts]
                pipe = self._load(models, dtype, without=())
                text.record(pipe, [self._arguments(i) for i in range(len(self))], ranks.device)
                release(pipe, names)
            except Exception as error:
                failure = text_of(error)
        failure = ranks.broadcast(failure)
        if failure:
            raise ValueError(f"sampling: the prompts cannot be encoded: {failure}")
        text, self._pictures = ranks.broadcast((text, self._pictures))
        pipe = pipe or self._load(models, dtype, without=names)
        text.replay_in(pipe, ranks.device)
        self._move_components(pipe, models, ranks.device)
        self._pipe, self._shard, self._model = pipe, data_shard, transformer

    @torch.no_grad()
    def draw(self) -> list[Tensor]:
        """Return this data rank's share of the samples, in [0, 1]: [c, h, w], or [c, f, h, w] for clips.

        Every data rank draws n = ⌈prompts / data ranks⌉ samples, because sharded weights are gathered by all ranks
        together: after the last prompt, the first ones are drawn again. Samples in data-rank order are in prompt order.
        For the same reason, each data rank draws all prompts if they need different numbers of forwards.

        Ranks: the whole world. The transformer must be in eval mode.
        """
        shard = self._shard if have_equal_work(self.prompts) else DataShard(0, 1)
        share = -(-len(self) // shard.size)
        first = shard.rank * share
        return [self._sample(i % len(self)) for i in range(first, first + share)]

    def _sample(self, i: int) -> Tensor:
        seed = self.prompts[i].seed
        generator = torch.Generator().manual_seed(self._seed + i if seed is None else seed)
        with called_by_pipeline(self._model):
            result = self._pipe(**self._arguments(i), generator=generator, output_type="pt", return_dict=False)[0]
        sample: Tensor = result[0].detach().float()
        return sample.transpose(0, 1) if sample.ndim == 4 else sample  # clips are [f, c, h, w]

    def _arguments(self, i: int) -> dict[str, Any]:
        picture = {} if self._pictures[i] is None else {self._picture_name: self._pictures[i]}
        return {"prompt": self.prompts[i].prompt, **picture, **self._call, **self.prompts[i].call}

    def _load(self, models: Mapping[str, Any], dtype: torch.dtype, *, without: Sequence[str]) -> Any:
        pipe = load_pipeline(self._source, dtype, setting=self._setting, without=without, components=models)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _move_components(self, pipe: Any, models: Mapping[str, nn.Module], device: torch.device) -> None:
        """Move the other components to the device, and make them parallel like the transformer."""
        installed = installed_on(next(iter(models.values())))
        for name, other in pipe.components.items():
            if not isinstance(other, nn.Module) or name in models:
                continue
            other.requires_grad_(False).eval().to(device)
            if installed is None or installed.session.groups.context is None:
                continue
            if name in family_class(type(pipe)).components.train:
                parallelize(other, installed.session.config, shares=installed.session.groups.shares)
            elif hasattr(other, "decode"):
                with suppress(ValueError):  # a class that is not supported decodes on each rank
                    parallelize_vae(other, installed.session.groups)


def _picture(file: str | Path) -> Image.Image:
    return Image.fromarray(read_image(file).permute(1, 2, 0).numpy())


def _check_call(kind: type, call: Mapping[str, Any], where: str) -> None:
    accepted = [name for name in inspect.signature(kind.__call__).parameters if name != "self"]
    unknown = [name for name in call if name not in accepted]
    if unknown:
        raise FamilyError(f"{where} {unknown[0]}, which is not an argument of {kind.__name__}: {', '.join(accepted)}")


def _check_picture(kind: type, where: str, *, has_image: bool) -> None:
    """Raise FamilyError if the pipeline needs a picture that a prompt does not have, or takes none."""
    accepted = family_class(kind).picture in inspect.signature(kind.__call__).parameters
    if accepted and not has_image and not family_class(kind).optional_reference:
        raise FamilyError(
            f"{where} no image, but {kind.__name__} draws from pictures: use for example "
            "sampling.prompts=[{prompt: a red fox, image: photo.png}]"
        )
    if has_image and not accepted:
        raise FamilyError(f"{where} an image, but {kind.__name__} takes no picture: leave it out")
