"""What a parallel model carries: its session, the plan that was installed on it, and how it follows changes."""

from __future__ import annotations

import copy
import inspect
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from lightning_cp.compat.torch_names import dynamo_is_imported
from lightning_cp.engine.attention_patch import is_stuck
from lightning_cp.engine.compiling import compile_rules
from lightning_cp.engine.diffusers_dispatch import backends_of, dispatcher_of
from lightning_cp.engine.dropout import ShardDropouts
from lightning_cp.engine.forwards import Around, Function, own_forward
from lightning_cp.engine.hooks import ModelHook
from lightning_cp.engine.install import Patches, install, strip
from lightning_cp.engine.paths import submodule
from lightning_cp.engine.rules import Rules
from lightning_cp.engine.session import Session
from lightning_cp.engine.structure import Structure
from lightning_cp.engine.value_checks import register
from lightning_cp.errors import PlanError

_INSTALLED = "_lightning_cp"


class Installed(Around):
    """A plan on a model. It runs the model's forward, and checks before it that the model is still the same.

    A module that was exchanged, added or dropped, another attention processor, a LoRA put around a planned layer,
    another class or forward of a module: the plan is installed again, if it still fits. Wrappers of `forward` by
    diffusers and accelerate need nothing.

    Attributes:
        module: the model.
        rules: of the plan, for the model as it was when the plan was last installed.
    """

    def __init__(
        self, module: nn.Module, session: Session, rules: Rules, plan: object, *, dispatcher: Any = None
    ) -> None:
        self.module, self.session, self.rules = module, session, rules
        register(session)
        self.original: Function | None = None
        self._had_forward = False
        self._plan, self._dispatcher = plan, dispatcher
        self._signature = inspect.signature(type(module).forward)
        self._patches: Patches = {}
        self._dropouts = ShardDropouts(session)
        self._touched: list[nn.Module] = []
        self._attending: list[nn.Module] = []
        self._hook: ModelHook | None = None
        self._structure: Structure | None = None

    def put_on(self) -> None:
        """Install the plan. Should that fail, the model is as it was."""
        self._had_forward = own_forward(self.module).get() is not None
        try:
            self._install()
        except BaseException:
            strip(self.module.modules())
            raise
        self._forget_compiled()
        place = own_forward(self.module)
        self.original = place.get()
        forward = self.module.forward if self.original is None else self.original
        place.put(update_wrapper(partial(_run, self), forward))
        self.module.__dict__[_INSTALLED] = self

    def take_off(self) -> None:
        """Undo `put_on`: the model is as it was. Raises: PlanError: a decorator is in the way; nothing was changed."""
        for path, inner in self.module.named_modules():
            if is_stuck(inner):
                raise PlanError(
                    f"{path}.forward was decorated after apply_context_parallel: undo that before "
                    "remove_context_parallel, which cannot take its own forward from beneath"
                )
        strip([*self.module.modules(), *self._touched])
        self._forget_compiled()
        self._hook, self._structure = None, None  # a wrapper around ours, which we cannot take off, calls the original
        place = own_forward(self.module, above=self)
        function = place.get()
        if isinstance(function, partial) and function.args[:1] == (self,):
            if self._had_forward and self.original is not None:
                place.put(self.original)
            else:
                place.clear(self.module)
        del self.module.__dict__[_INSTALLED]

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward: context-parallel, or as it is once the plan was taken off."""
        if self.module.__dict__.get(_INSTALLED) is not self:
            return self._own_forward(*args, **kwargs)
        if self._structure is None or not self._structure.holds():
            self._follow()
        assert self._hook is not None, "a plan is installed"
        return self._hook.run(self.module, self._own_forward, args, kwargs)

    def _forget_compiled(self) -> None:
        """Drop compiled code where a part of the model was compiled on its own: compilers do not guard on hooks."""
        if any(inner._compiled_call_impl is not None for inner in self.module.modules() if inner is not self.module):
            torch.compiler.reset()

    def _own_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.original is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.original(*args, **kwargs)

    def _install(self) -> None:
        self._hook = install(
            *(self.module, self.rules, self.session),
            patches=self._patches,
            dropouts=self._dropouts,
            signature=self._signature,
            dispatcher=self._dispatcher,
        )
        self._touched = list(self.module.modules())
        self._attending = [submodule(self.module, path) for path in self.rules.attention]
        self._structure = Structure(self.module, self.rules)

    def _follow(self) -> None:
        """Install the plan again on a model that has changed. Raises: PlanError: it no longer fits."""
        if torch.compiler.is_compiling():  # without fullgraph=True this forward runs eagerly then, and follows
            raise PlanError(
                f"{type(self.module).__name__} was changed after it was compiled, or is a deep copy that has not run: "
                "call it once without torch.compile (`with torch.compiler.set_stance('force_eager')`), so that the "
                "plan is installed on it"
            )
        follow = self._follow_eagerly
        if dynamo_is_imported():  # else there is nothing that could trace it
            follow = torch.compiler.disable(follow)  # type: ignore[no-untyped-call]
        follow()

    def _follow_eagerly(self) -> None:
        try:
            found = Structure(self.module, self.rules)
        except PlanError:  # planned modules are missing
            found = None
        if found is not None and self._structure is not None and found.has_parts_of(self._structure):
            self._structure = found  # there are other wrappers around the same parts
            return
        self._structure = None
        strip([*self.module.modules(), *self._touched])
        try:
            self._adapt()
            self._install()
        except BaseException as error:
            strip(self.module.modules())
            self._structure = None
            if not isinstance(error, PlanError):
                raise
            raise PlanError(
                f"{type(self.module).__name__} was changed after apply_context_parallel, and its plan no longer fits: "
                f"{error}. Undo the change, or call remove_context_parallel and apply a plan that fits"
            ) from error

    def _adapt(self) -> None:
        """Compile the plan for the model as it is now. Raises: PlanError: attention that it had is out of reach."""
        self.rules = self.session.rules = compile_rules(self.module, self._plan)
        self._signature = inspect.signature(type(self.module).forward)
        if self._dispatcher is None and dispatcher_of(self.module) is not None:
            self._dispatcher, self.session.backends = dispatcher_of(self.module), backends_of(self.module)
            self._patches.clear()  # they were made without the dispatcher
        attending = {submodule(self.module, path) for path in self.rules.attention}
        lost = set(self._attending) - attending
        for path, inner in self.module.named_modules():
            if inner in lost:
                raise PlanError(
                    f"{path} ({type(inner).__name__}) attended, and what was put in place of its forward, class or "
                    "processor makes no attention call that could be intercepted: it must call diffusers' "
                    "dispatch_attention_fn or F.scaled_dot_product_attention, itself or in a plain function that it "
                    "calls. To leave its attention out, exchange the whole module"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Installed:
        """For a copy of the model: the same plan, which the copy's first forward installs on its own modules."""
        module = memo.get(id(self.module))
        if module is None:  # a part of the model is copied
            return self
        copied = Installed(module, self.session.of_copy(), self.rules, self._plan, dispatcher=self._dispatcher)
        memo[id(self)] = copied
        copied._had_forward = self._had_forward
        copied.original = copy.deepcopy(self.original, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.session.__reduce_ex__(protocol)


def installed_on(module: nn.Module) -> Installed | None:
    """What `parallelize` left on a module; None for one that is not context-parallel, and for a compiler's wrapper."""
    found: Installed | None = module.__dict__.get(_INSTALLED)
    return found


def _run(installed: Installed, *args: Any, **kwargs: Any) -> Any:
    return installed.run(args, kwargs)
