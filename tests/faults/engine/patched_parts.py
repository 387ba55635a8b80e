"""Changes of a model after `apply_context_parallel`: other modules, classes and functions in every place of a block.

Each change is made to a model built by `build` with classes of its own, so that a patch of a class touches no other.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from lightning_cp.plans import Plan, split

PLAN = Plan({"blocks": {"x": split(1, "image")}}, {"proj_out": split(1, "image")})


def attend(module: nn.Module, x: Tensor) -> Tensor:
    """Self-attention of 4 heads without weights."""
    q = x.unflatten(-1, (4, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q.flip(-1), q).transpose(1, 2).flatten(2)


def narrow(module: nn.Module, x: Tensor) -> Tensor:
    """The same, with other queries."""
    return attend(module, 0.5 * x)


class Attending(nn.Module):
    """Attends in its own forward."""

    forward = attend


class ByMethod(nn.Module):
    """Attends in a method that another method calls."""

    def forward(self, x: Tensor) -> Tensor:
        return sum((self._half(x) for _ in range(2)), torch.zeros_like(x))

    def _half(self, x: Tensor) -> Tensor:
        return 0.5 * self._attend(x)

    def _attend(self, x: Tensor) -> Tensor:
        return attend(self, x)


class ByStaticMethod(ByMethod):
    """Attends in a static method."""

    @staticmethod
    def _attend(x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


class ByAttribute(nn.Module):
    """Stores the function that attends."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = F.scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return self.attention(q, q.flip(-1), q).transpose(1, 2).flatten(2)


class BySuper(Attending):
    """Leaves attention to its parent class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(0.5 * x)


class Processor:
    """Processor of diffusers' `Attention` that attends in a method."""

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.attend(attn.to_q(hidden_states))

    def attend(self, x: Tensor) -> Tensor:
        return attend(nn.Module(), x)


class Other(Processor):
    """A processor that also holds a function."""

    def __init__(self) -> None:
        self.function = attend

    def attend(self, x: Tensor) -> Tensor:
        return self.function(nn.Module(), 0.5 * x)


class WithDiffusers(nn.Module):
    """Holds an `Attention` of diffusers."""

    def __init__(self) -> None:
        from diffusers.models.attention_processor import Attention

        super().__init__()
        torch.manual_seed(7)
        self.attention = Attention(16, heads=4, dim_head=4).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x)
        return out


def model_of(kind: Callable[[], nn.Module], blocks: int) -> Any:
    """A new model of some blocks of width 16, of a class made for it; `PLAN` is its plan."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.proj_out = nn.ModuleList(kind() for _ in range(blocks)), nn.Linear(16, 3)

        def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
            for block in self.blocks:
                x = block(x)
            return (self.proj_out(x),)

    torch.manual_seed(0)
    return Model().double()


def build() -> Any:
    """A new model of two blocks of width 16, of classes made for it."""

    class Base(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(x)

        def act(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    class Feed(Base):
        pass

    class Att(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(-1, (4, -1)).transpose(1, 2)
            out: Tensor = self.out(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))
            return out

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.feed = Att(), Feed()
            self.net = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
            self.table, self.tail = nn.ModuleDict({"a": nn.Tanh()}), nn.ModuleList([nn.Linear(16, 16)])

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(x)
            x = x + self.net(x) + self.feed(x)
            for inner in (*self.table.values(), *self.tail):
                x = x + inner(x)
            return x

    return model_of(Block, 2)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def _class_of_attention(block: Any) -> None:
    class Narrow(type(block.attn)):  # type: ignore[misc]
        forward = narrow

    block.attn.__class__ = Narrow


def _block_forward(block: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x + self.attn(0.5 * x)
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)

    type(block).forward = forward


def _nested(block: Any) -> None:
    block.tail[0] = nn.Sequential(nn.ModuleDict({"x": nn.Identity()})["x"], nn.Sequential(Attending()))


def _deleted(block: Any) -> None:
    del block.table["a"], block.tail[0]


def _identity(block: Any) -> None:
    block.attn = nn.Sequential(Attending(), Attending())


def _around(block: Any) -> None:
    original = type(block.attn).forward
    type(block.attn).forward = lambda self, x: original(self, 0.5 * x)


def _processor(block: Any, processor: object) -> None:
    block.feed = WithDiffusers()
    block.feed.attention.set_processor(processor)


def _attributes(block: Any) -> None:
    block.__dict__ = {**block.__dict__, "_modules": {**block._modules, "feed": Attending()}}


FOLLOWED: dict[str, Callable[[Any], None]] = {
    "module": lambda block: setattr(block, "feed", Attending()),
    "module of diffusers": lambda block: setattr(block, "feed", WithDiffusers()),
    "entry of a container": lambda block: block.net[1].__setitem__(1, Attending()),
    "nested containers": _nested,
    "entry of a dict": lambda block: block.table.__setitem__("a", Attending()),
    "appended to a list": lambda block: block.tail.append(Attending()),
    "register_module": lambda block: block.register_module("feed", Attending()),
    "dict of children": lambda block: setattr(block, "_modules", {**block._modules, "feed": Attending()}),
    "deleted": _deleted,
    "parametrization": lambda block: parametrize.register_parametrization(block.net[1][0], "weight", Doubled()),
    "class": lambda block: setattr(block.feed, "__class__", Attending),
    "forward of an instance": lambda block: setattr(block.feed, "forward", types.MethodType(attend, block.feed)),
    "forward of an attention": lambda block: setattr(block.attn, "forward", types.MethodType(narrow, block.attn)),
    "forward of a class": lambda block: setattr(type(block.feed), "forward", attend),
    "forward of a parent class": lambda block: setattr(type(block.feed).__mro__[1], "forward", attend),
    "forward of an attention's class": lambda block: setattr(type(block.attn), "forward", narrow),
    "forward of a block's class": _block_forward,
    "forward around the original": _around,
    "module that attends in a method": lambda block: setattr(block, "feed", ByMethod()),
    "module that attends in a static method": lambda block: setattr(block, "feed", ByStaticMethod()),
    "module that stores its function": lambda block: setattr(block, "feed", ByAttribute()),
    "method of an instance": lambda block: setattr(block.feed, "act", types.MethodType(attend, block.feed)),
    "method of a class": lambda block: setattr(type(block.feed).__mro__[1], "act", attend),
    "method of a processor": lambda block: _processor(block, Processor()),
    "function of a processor": lambda block: _processor(block, Other()),
    "dict of attributes": _attributes,
    "__call__ of a class": lambda block: setattr(type(block.feed), "__call__", attend),
    "attention of a parent class": lambda block: setattr(block, "feed", BySuper()),
}


def _beside_another(block: Any) -> None:
    block.feed = Attending()
    block.attn.forward = lambda x: x


def _silent_class(block: Any) -> None:
    class Silent(type(block.attn)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return x

    block.feed = Attending()
    block.attn.__class__ = Silent


def _multihead(block: Any) -> None:
    class MultiHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(16, 4, batch_first=True).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x, x, x)[0]
            return out

    block.feed = MultiHead()


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "forward that attends nowhere": (
        lambda block: setattr(type(block.attn), "forward", lambda self, x: x),
        r"blocks\.0 \(Block\) makes no attention call",
    ),
    "one attention of several": (_beside_another, r"blocks\.1\.attn\.forward was replaced"),
    "class of one attention of several": (_silent_class, r"blocks\.1\.attn is gone, or no longer attends"),
    "class of attention": (_class_of_attention, r"blocks\.1\.attn has another class\. Apply the plan again"),
    "attention exchanged": (_identity, r"blocks\.1\.attn is gone, or no longer attends"),
    "attention of PyTorch": (_multihead, "nn.MultiheadAttention"),
}


# Attention in what modules and processors hold: helper objects, partials, tables, lambdas


def scaled(x: Tensor, scale: float = 1.0) -> Tensor:
    """Self-attention of 4 heads without weights."""
    q = x.reshape(*x.shape[:2], 4, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(scale * q, q.flip(-1), q).transpose(1, 2).flatten(2)


def imported(x: Tensor) -> Tensor:
    """Attention under a name that is no global."""
    from torch.nn.functional import scaled_dot_product_attention as attention

    q = x.reshape(*x.shape[:2], 4, -1).transpose(1, 2)
    return attention(q, q.flip(-1), q).transpose(1, 2).flatten(2)


class Attends:
    """A helper that attends."""

    def __call__(self, x: Tensor) -> Tensor:
        return scaled(x)

    def run(self, x: Tensor) -> Tensor:
        return scaled(x)


class Nested:
    """A helper that holds another one."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        self.inner = inner

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def run(self, x: Tensor) -> Tensor:
        return self.inner(x)


def build_held() -> Any:
    """A model of one block, whose module and processor attend, and also call what they hold."""
    from diffusers.models.attention_processor import Attention

    class Helper:
        def __call__(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

        def run(self, x: Tensor) -> Tensor:
            return torch.sin(x)

    class Processor:
        def __init__(self) -> None:
            self.inner, self.function, self.scale = Helper(), torch.tanh, 1.0

        def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            x = attn.to_q(hidden_states)
            return self.attend(x) + self.inner(x) + self.inner.run(x) + self.function(x)

        def attend(self, x: Tensor) -> Tensor:
            return scaled(x, self.scale)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(16, heads=4, dim_head=4, processor=Processor())
            self.helper, self.items, self.table = Nested(Helper()), [torch.tanh], {"a": torch.tanh}
            self.only_in_evaluation: Any = None

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(x) + self.helper(x) + self.items[0](x) + self.table["a"](x)
            if self.only_in_evaluation is not None and not self.training:
                x = self.only_in_evaluation(x)
            return x

    return model_of(Block, 1)


def _held_processor(block: Any) -> Any:
    return block.attention.processor


HELD: dict[str, Callable[[Any], None]] = {
    "number of a processor": lambda block: setattr(_held_processor(block), "scale", 0.5),
    "function of a processor": lambda block: setattr(_held_processor(block), "function", scaled),
    "bound method of a processor": lambda block: setattr(_held_processor(block), "function", Attends().run),
    "helper without attention": lambda block: setattr(block, "helper", torch.sin),
    "helper of a processor": lambda block: setattr(_held_processor(block), "inner", Attends()),
    "attributes of a processor": lambda block: _held_processor(block).__dict__.update(inner=Attends()),
    "partial of a processor": lambda block: setattr(_held_processor(block), "function", partial(scaled, scale=0.5)),
    "helper": lambda block: setattr(block, "helper", Attends()),
    "helper in a helper": lambda block: setattr(block.helper, "inner", Attends()),
    "class of a helper in a helper": lambda block: setattr(block.helper.inner, "__class__", Attends),
    "function of a helper's class": lambda block: setattr(
        type(_held_processor(block).inner), "run", lambda self, x: scaled(x)
    ),
    "item of a list": lambda block: block.items.__setitem__(0, scaled),
    "entry of a table": lambda block: block.table.update(a=scaled),
    "import in a function": lambda block: setattr(block, "helper", Nested(imported)),
    "lambda in a helper": lambda block: setattr(block, "helper", Nested(lambda x: Attends()(x))),
    "only in evaluation": lambda block: setattr(block, "only_in_evaluation", Nested(imported)),
}
