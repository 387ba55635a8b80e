"""A plan installed on a model: its hooks, its session, and the next installation after the model has changed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial, update_wrapper
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_cp.compat.compiler import allow_graphs_of_lengths, dynamo_is_imported, is_allowed_in_graph
from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.attention.attention_calls import attending_processor
from lightning_cp.engine.attention.diffusers_dispatch import backends_of
from lightning_cp.engine.attention.linear import LinearAttention
from lightning_cp.engine.attention.scopes import Scopes
from lightning_cp.engine.attention.stand_ins import (
    are_installed,
    hold_originals,
    hold_stand_ins,
    install_stand_ins,
    release_stand_ins,
)
from lightning_cp.engine.caches import StepCaches
from lightning_cp.engine.fit_plan import fit_plan
from lightning_cp.engine.forwards import ForwardWrapper, Function, own_forward
from lightning_cp.engine.hook_base import add_hooks, remove_hooks
from lightning_cp.engine.hooks import ModelHook, register_session
from lightning_cp.engine.model_plan import ModelPlan
from lightning_cp.engine.paths import submodule
from lightning_cp.engine.session import Session
from lightning_cp.engine.sharding.convolutions import EmbeddingHook, HaloHook
from lightning_cp.engine.sharding.sharders import ArgumentHook, OutputHook, PadHook
from lightning_cp.engine.structure import Structure
from lightning_cp.engine.tiles import tile_feed_forwards, untile
from lightning_cp.errors import PlanError

_ORIGINAL = "_lightning_cp_original"  # attribute of a processor of the engine: the processor that it replaces
_MARKED = "_parallel_config"
_DEPTH = 3  # how far objects inside objects are followed
_LIBRARIES = ("torch", "lightning_cp", "diffusers.hooks")
_NO_HELPERS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    tuple,
    type(None),
    type,
    Tensor,
    nn.Module,
    ModuleType,
    FunctionType,
)
_INSTALLED = "_lightning_cp"


def install(
    module: nn.Module,
    model_plan: ModelPlan,
    session: Session,
    *,
    scopes: Scopes,
    signature: Any,
    mlp_tiles: int | str | None = None,
) -> ModelHook:
    """Install `model_plan` on the modules inside `module`. If a step fails, `strip` undoes the steps before it.

    Args:
        scopes: scopes of the model. Reused by later installations, so that compiled blocks stay valid.
        signature: signature of the model's forward.
        mlp_tiles: see `engine.apply.apply_context_parallel`.
    Returns: the `ModelHook` that runs the model's forward.
    """
    _install_processors(module, model_plan, session)
    for container in (x for inner in module.modules() for x in _held_by(inner)):
        hold_stand_ins(container)
    for inner, hook in scopes.hooks(model_plan):
        add_hooks(inner, before=hook.before, after=hook.after, always=True)
    arguments, outputs = [], []
    for rule in model_plan.arguments:
        refused = model_plan.refused if rule.is_block else {}
        order = list(inspect.signature(type(submodule(module, rule.paths[0])).forward).parameters)[1:]
        argument_hook = ArgumentHook(session, rule, refused, rule.paths[0] or "forward", order)
        arguments += [argument_hook] if "" in rule.paths else []
        for path in filter(None, rule.paths):
            add_hooks(submodule(module, path), before=argument_hook.before)
    for output in model_plan.outputs:
        output_hook = OutputHook(session, output)
        if output.path:
            add_hooks(submodule(module, output.path), after=output_hook.after)
        else:
            outputs.append(output_hook)
    for embedding in model_plan.embeddings:
        embedding_hook = EmbeddingHook(session, embedding)
        add_hooks(submodule(module, embedding.path), before=embedding_hook.before, after=embedding_hook.after)
    for halo in model_plan.halos:
        halo_hook = HaloHook(session, halo)
        add_hooks(submodule(module, halo.path), before=halo_hook.before, after=halo_hook.after)
    if mlp_tiles is not None:
        tile_feed_forwards(module, model_plan, mlp_tiles)
    checkpointing = [inner for inner in module.modules() if hasattr(inner, "gradient_checkpointing")]
    padding = PadHook(session, signature, model_plan.pads) if model_plan.pads else None
    return ModelHook(
        session, signature, model_plan, scopes.of_model(model_plan), checkpointing, padding, arguments, outputs
    )


def strip(modules: Iterable[nn.Module]) -> None:
    """Undo `install` on these modules, also on deep copies. The model's forward stays replaced."""
    for module in dict.fromkeys(modules):
        remove_hooks(module)
        untile(module)
        processor: Any = getattr(module, "processor", None)
        original = original_processor(processor)
        if original is not processor:
            module.processor = original
        attributes = getattr(original, "__dict__", {})
        if isinstance(attributes.get(_MARKED), ContextParallelConfig):
            del attributes[_MARKED]
        for container in _held_by(module):
            hold_originals(container)


def original_processor(processor: Any) -> Any:
    """Return the processor that the engine's processor replaces; return other processors unchanged."""
    return getattr(processor, "__dict__", {}).get(_ORIGINAL, processor)


def _held_by(owner: Any, depth: int = _DEPTH) -> Iterator[dict[Any, Any] | list[Any]]:
    """Yield the attributes of a module, and of helper objects in them, and lists and dicts: they may hold functions."""
    container = owner if isinstance(owner, (dict, list)) else getattr(owner, "__dict__", None)
    if not isinstance(container, (dict, list)):
        return
    yield container
    for value in container.values() if isinstance(container, dict) else container:
        if depth > 0 and not isinstance(value, _NO_HELPERS) and not type(value).__module__.startswith(_LIBRARIES):
            yield from _held_by(value, depth - 1)


def _install_processors(module: nn.Module, model_plan: ModelPlan, session: Session) -> None:
    for path, kinds in model_plan.attention.items():
        owner: Any = submodule(module, path)
        processor = getattr(owner, "processor", None)
        if kinds and kinds[0].form == "linear":
            _exchange_processor(owner, LinearAttention(session, kinds[0].queries))
        elif attending_processor(owner) is not processor:
            _exchange_processor(owner, attending_processor(owner))
        elif kinds is None and hasattr(processor, _MARKED):  # diffusers' processors pass it to attention across ranks
            processor.__dict__[_MARKED] = session.config


def _exchange_processor(module: Any, replacement: Any) -> None:
    """Set another processor on `module`; it stores the original for `strip`."""
    replacement.__dict__[_ORIGINAL] = module.processor
    module.processor = replacement


class Installed(ForwardWrapper):
    """A plan installed on a model. Runs the model's forward, and checks before it whether the model has changed.

    If the model has changed, the plan is installed again. If modules that it names are others, were removed or have
    another class, it must be applied again: PlanError says which.

    Attributes:
        module: the model.
        model_plan: the plan, fitted to the model when it was last installed.
        signature: signature of the model's forward.
        caches: diffusers' step caches on the model.
    """

    def __init__(
        self, module: nn.Module, session: Session, model_plan: ModelPlan, plan: object, mlp_tiles: int | str | None
    ) -> None:
        self.module, self.session, self.model_plan = module, session, model_plan
        register_session(session)
        self.caches = StepCaches(module, session)
        self.original: Function | None = None
        self._had_forward = False
        self._plan, self._mlp_tiles = plan, mlp_tiles
        self.signature = inspect.signature(type(module).forward)
        self._scopes = Scopes(session, module)
        self._touched: list[nn.Module] = []
        self._hook: ModelHook | None = None
        self._structure: Structure | None = None  # None: the plan must be installed again
        self._first: Structure | None = None
        self._traced_forward: Function | None = None

    def install(self) -> None:
        """Install the plan. If that fails, the model is restored."""
        self._had_forward = own_forward(self.module).get() is not None
        try:
            self._install_plan()
            self.caches.reset()  # steps of whole tokens would not fit
        except BaseException:
            strip(self.module.modules())
            release_stand_ins(self)
            self.caches.release()
            raise
        self._forget_compiled()
        slot = own_forward(self.module)
        self.original = slot.get()
        forward = self.module.forward if self.original is None else self.original
        slot.put(update_wrapper(partial(_run, self), forward))
        self.module.__dict__[_INSTALLED] = self

    def uninstall(self) -> None:
        """Undo `install`."""
        strip([*self.module.modules(), *self._touched])
        release_stand_ins(self)
        self.caches.release()
        self._forget_compiled()
        self._hook, self._structure = None, None  # a wrapper around this forward may stay
        slot = own_forward(self.module, above=self)
        function = slot.get()
        if isinstance(function, partial) and function.args[:1] == (self,):
            if self._had_forward and self.original is not None:
                slot.put(self.original)
            else:
                slot.clear(self.module)
        del self.module.__dict__[_INSTALLED]

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward: context-parallel, or the original once the plan was removed."""
        if self.module.__dict__.get(_INSTALLED) is not self:
            return self._own_forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            self._reinstall_at_trace_time()
        elif not are_installed():
            install_stand_ins(self)
        if not self.is_current():
            self._reinstall()
        if not torch.compiler.is_compiling():
            allow_graphs_of_lengths()
        assert self._hook is not None, "a plan is installed"
        self.caches.before_forward(kwargs)
        try:
            return self._hook.run(self.module, self._own_forward, args, kwargs)
        except BaseException:
            self.caches.reset()  # a forward that did not end has left steps that fit no other
            raise

    def is_current(self) -> bool:
        """Return True if the plan is installed on the model as it is now. torch.compile can trace this."""
        return self._structure is not None and self._structure.is_unchanged() and not self.caches.have_changed()

    def before_replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the arguments of a forward that a CUDA graph repeats, and compare them between ranks, as in `run`."""
        assert self._hook is not None, "a plan is installed"
        self._hook.before(self.module, args, kwargs)
        self.session.peers.start()

    def _forget_compiled(self) -> None:
        """Drop compiled code if a submodule was compiled separately: torch.compile does not guard on hooks."""
        if any(inner._compiled_call_impl is not None for inner in self.module.modules() if inner is not self.module):
            torch.compiler.reset()

    def _own_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.original is not None:
            return self.original(*args, **kwargs)
        if self._traced_forward is not None and torch.compiler.is_compiling():
            return self._traced_forward(self.module, *args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def _install_plan(self) -> None:
        self.caches.follow()
        install_stand_ins(self)
        self._hook = install(
            self.module,
            self.model_plan,
            self.session,
            scopes=self._scopes,
            signature=self.signature,
            mlp_tiles=self._mlp_tiles,
        )
        self.session.unchecked = {False, True}
        self._touched = list(self.module.modules())
        self._structure = Structure(self.module, self.model_plan)
        self._first = self._first or self._structure
        self._structure.check_planned(self._first)

    def _reinstall(self) -> None:
        """Install the plan again on a model that has changed. Raises: PlanError: it no longer fits."""
        if torch.compiler.is_compiling():  # unless fullgraph=True, dynamo then runs this forward eagerly
            raise PlanError(
                f"{type(self.module).__name__} was changed after apply_context_parallel: apply the plan again. To see "
                "what has changed, call it once without torch.compile (`torch.compiler.set_stance('force_eager')`)"
            )
        if self._structure is not None and not self._structure.has_functions():
            self._forget_compiled()
        reinstall = self._reinstall_eagerly
        if dynamo_is_imported():  # else there is nothing that could trace it
            reinstall = torch.compiler.disable(reinstall)  # type: ignore[no-untyped-call]
        reinstall()

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _reinstall_at_trace_time(self) -> None:
        """Install the plan again on a model that has changed, while its forward is traced. Runs without being traced.

        If the plan does not fit, it stays removed, and `_reinstall` raises the error.
        """
        kind = type(self.module)
        self._traced_forward = kind.forward if is_allowed_in_graph(kind) else None  # dynamo looks up no method of it
        if not are_installed():
            install_stand_ins(self)
        if self._structure is None or not self._structure.is_unchanged_eagerly() or self.caches.have_changed():
            with suppress(PlanError):
                self._reinstall_eagerly()

    def _reinstall_eagerly(self) -> None:
        self.caches.follow()
        self._structure = None
        strip([*self.module.modules(), *self._touched])
        try:
            self.model_plan = self.session.model_plan = fit_plan(self.module, self._plan)
            self.signature = inspect.signature(type(self.module).forward)
            self.session.backends = backends_of(self.module)
            self._install_plan()
        except BaseException as error:
            strip(self.module.modules())
            self._structure = None
            if not isinstance(error, PlanError):
                raise
            raise PlanError(
                f"{type(self.module).__name__} was changed after apply_context_parallel: {error}. Apply the plan again "
                "(remove_context_parallel, then apply_context_parallel), or undo the change"
            ) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> Installed:
        """Copy the plan for a deep copy of the model. The first forward of the copy installs it."""
        module = memo.get(id(self.module))
        if module is None:  # a part of the model is copied
            return self
        copied = Installed(module, self.session.of_copy(), self.model_plan, self._plan, self._mlp_tiles)
        memo[id(self)] = copied
        copied._had_forward = self._had_forward
        copied.original = copy.deepcopy(self.original, memo)
        return copied

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.session.__reduce_ex__(protocol)


def installed_on(module: nn.Module) -> Installed | None:
    """Return the state of a parallel model; None for other modules, and for torch.compile's wrapper."""
    installed: Installed | None = module.__dict__.get(_INSTALLED)
    return installed


def sessions_in(module: nn.Module) -> Iterator[Session]:
    """Yield the sessions of the parallel models in a module, which may be inside of DDP, peft or Fabric's wrapper."""
    installed = installed_on(module)
    if installed is not None:
        yield installed.session
        return
    for child in module.children():
        yield from sessions_in(child)


def _run(installed: Installed, *args: Any, **kwargs: Any) -> Any:
    return installed.run(args, kwargs)
