"""Stages of a pipeline call (encode, denoise, decode), and the placement of weights in each stage.

The stage follows from the calls: the first transformer call starts denoising, and the first `vae.decode` after it
starts decoding. No pipeline needs special code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp.errors import PlanError
from lightning_cp.nest import of_type, replace
from lightning_cp.pipelines.components import experts_of
from lightning_cp.pipelines.guidance.controlnets import is_controlnet
from lightning_cp.pipelines.placement.sharding import is_vae
from lightning_cp.pipelines.settings import Placement
from lightning_cp.undoable import Around, Undo, intercept_calls, intercept_method

_HOST = torch.device("cpu")


class ComponentStage(IntEnum):
    """Stages of a call in the order in which they run."""

    ENCODE = 0
    DENOISE = 1
    DECODE = 2


@dataclass(eq=False)
class ComponentStages:
    """The components of one pipeline, moved to the rank's device in the stage that needs them.

    A component that is called in another stage is moved to the device too, and stays there until the stage changes.

    Attributes:
        pipeline: class name of the pipeline, for errors.
        setting: "offload": components are in host memory outside their stage. "release": weights are freed when a
            later stage begins, and cannot be restored.
        device: this rank's device.
        components: modules by name.
        stages: stage by component name. Components without an entry may be called at any time (a safety checker) and
            are never freed.
        experts: transformers that compute different steps; "offload" keeps only one on the device.
        current: current stage; None between calls.
        released: names of the components with freed weights.
    """

    pipeline: str
    setting: Placement
    device: torch.device
    components: Mapping[str, nn.Module]
    stages: Mapping[str, ComponentStage]
    experts: tuple[str, ...] = ()
    current: ComponentStage | None = None
    released: list[str] = field(default_factory=list)
    _expert: str | None = None

    @contextmanager
    def call(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Run one pipeline call in this context. Raises: PlanError: the call needs a released component."""
        self._check(arguments)
        self._begin(ComponentStage.ENCODE)
        for name, stage in self.stages.items():
            if stage is ComponentStage.ENCODE and name not in self.released:  # any of their methods may be called
                self._to_device(name)
        try:
            yield
        finally:
            self.current = None
            self.offload_all()

    def offload_all(self) -> None:
        """Move all components to host memory between calls, if the setting is "offload"."""
        if self.setting == "offload":
            for name in self.components:
                self._offload(name)
            _empty_cache(self.device)

    def enter(self, stage: ComponentStage) -> None:
        """Enter the stage of the component that is called now. A decode before denoising counts as encoding."""
        is_early = stage is ComponentStage.DECODE and self.current is ComponentStage.ENCODE
        if self.current is None or self.current is stage or is_early:
            return
        self._begin(stage)

    def to_device(self, name: str, values: Any) -> Any:
        """Move a component to the rank's device, and return its arguments (`values`) on that device.

        Raises: PlanError: the component's weights were freed.
        """
        if name in self.released:
            raise PlanError(
                f"{self.pipeline} calls {name} after its stage, when its weights were already freed "
                "(stages='release'): use stages='offload'"
            )
        if self.setting == "offload" and name in self.experts and name != self._expert:
            for other in self.experts:
                if other != name:
                    self._offload(other)
            _empty_cache(self.device)
            self._expert = name
        self._to_device(name)
        if all(x.device == self.device for x in of_type(Tensor, values)):
            return values
        return replace(Tensor, lambda x: x.to(self.device), values)

    def _begin(self, stage: ComponentStage) -> None:
        self.current, self._expert = stage, None
        for name in self.components:
            other = self.stages.get(name)
            if self.setting == "offload" and other is not stage:
                self._offload(name)
            elif self.setting == "release" and other is not None and other < stage and name not in self.released:
                free(self.components[name])
                self.released.append(name)
        _empty_cache(self.device)

    def _to_device(self, name: str) -> None:
        self.components[name].to(self.device)

    def _offload(self, name: str) -> None:
        self.components[name].to(_HOST)

    def _check(self, arguments: Mapping[str, Any]) -> None:
        """Raise if a released component is needed: a transformer always, an encoder if a text prompt is given."""
        texts = [name for name, value in arguments.items() if "prompt" in name and _is_text(value)]
        for name in self.released:
            if self.stages[name] is ComponentStage.DENOISE or texts:
                why = "" if self.stages[name] is ComponentStage.DENOISE else f" for {texts[0]}"
                raise PlanError(
                    f"{self.pipeline}.{name} is needed{why}, but its weights were freed in an earlier call, because "
                    "stages='release' allows a single call: load the pipeline again, or use stages='offload'"
                )


def make_component_stages(
    pipe: Any,
    setting: Placement,
    components: Mapping[str, Any],
    transformers: Mapping[str, nn.Module],
    at: torch.device,
) -> ComponentStages | None:
    """Return the stages of a pipeline; None for the setting "together". Args: transformers: by name."""
    if setting == "together":
        return None
    modules: dict[str, nn.Module] = {}
    for name, module in components.items():
        if isinstance(module, nn.Module) and not any(module is other for other in modules.values()):
            modules[name] = module
    order = getattr(pipe, "model_cpu_offload_seq", None)
    stages = {name: _stage_of(name, module, transformers, order) for name, module in modules.items()}
    known = {name: stage for name, stage in stages.items() if stage is not None}
    return ComponentStages(type(pipe).__name__, setting, at, modules, known, experts_of(pipe, transformers))


def _stage_of(
    name: str, module: nn.Module, transformers: Mapping[str, nn.Module], order: str | None
) -> ComponentStage | None:
    """Return the stage of one component; None if it may be called at any time.

    Args: order: the pipeline's `model_cpu_offload_seq` of diffusers, "text_encoder->transformer->vae".
    """
    if name in transformers or is_controlnet(module):
        return ComponentStage.DENOISE
    if is_vae(module):
        return ComponentStage.DECODE
    if order is None:
        return ComponentStage.ENCODE
    names = order.split("->")
    if name not in names:
        return None
    before = names[: names.index(name)]
    return ComponentStage.DECODE if set(before) & transformers.keys() else ComponentStage.ENCODE


def watch_component_stages(stages: ComponentStages) -> Iterator[Undo]:
    """Wrap the calls of every component so that they change the stage.

    Must be the outermost wrapper: a rank changes the stage also for a call that another rank computes.
    """
    for name, module in stages.components.items():
        stage = stages.stages.get(name)
        if stages.setting == "offload":
            yield _restore_device(module)
        if stage is ComponentStage.DENOISE:
            yield intercept_calls(module, _around(stages, name, stage))
        elif is_vae(module):
            yield intercept_method(module, "decode", _around(stages, name, ComponentStage.DECODE))
            if hasattr(module, "encode"):
                yield intercept_method(module, "encode", _around(stages, name, None))
        else:
            yield module.register_forward_pre_hook(_before(stages, name), prepend=True, with_kwargs=True).remove


def _around(stages: ComponentStages, name: str, stage: ComponentStage | None) -> Around:
    def around(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if stage is not None:
            stages.enter(stage)
        args, kwargs = stages.to_device(name, (args, kwargs))
        return call(*args, **kwargs)

    return around


def _before(stages: ComponentStages, name: str) -> Callable[..., Any]:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return stages.to_device(name, (args, kwargs))

    return before


def _restore_device(module: nn.Module) -> Undo:
    """Return a function that moves a module back to its current device."""
    device = next((x.device for x in module.parameters()), None)

    def undo() -> None:
        module.to(device)

    return undo


def free(module: nn.Module) -> None:
    """Free a module's memory by moving its weights to the meta device. Its metadata (such as dtype) stays."""
    for x in module.parameters():
        if isinstance(x, DTensor):  # FSDP keeps references to the storage
            x.to_local().untyped_storage().resize_(0)
    module.to("meta")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and any(map(_is_text, value)))


def _empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
