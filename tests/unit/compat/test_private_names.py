"""Only `compat` imports private names of torch, Lightning, diffusers and accelerate."""

from __future__ import annotations

import ast

import pytest
import torch

from lightning_cp.compat.torch_names import aten
from lightning_cp.compat.versions import IncompatibleVersionError
from tests.unit.compat.private_uses import private_names, sources


def test_only_compat_uses_private_names_of_other_packages() -> None:
    assert {"recipes/bench.py", "lightning_cp/mesh/groups.py"} <= {path for path, _ in sources()}
    found = [f"{path}:{line}: {name}" for path, tree in sources() for line, name in private_names(tree)]
    assert not found, "import these through lightning_cp.compat:\n" + "\n".join(found)


def test_every_private_operator_exists() -> None:
    calls = [node for _, tree in sources() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {node.args[0].value for node in calls if ast.unparse(node.func) == "aten"}  # type: ignore[attr-defined]
    assert len(names) >= 8
    for name in names:
        assert aten(name) is getattr(torch.ops.aten, name)
    with pytest.raises(IncompatibleVersionError, match=r"torch .* it has no operator aten\._gone"):
        aten("_gone")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("from lightning.fabric.utilities.optimizer import _optimizers_to_device", "_optimizers_to_device"),
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch\ntorch._C._functorch.get_unwrapped(1)", "torch._C._functorch"),
        ("import torch\ntorch.ops.aten._to_copy", "torch.ops.aten._to_copy"),
        ("from torch import nn\nnn.Module._apply", "torch.nn.Module._apply"),
        (
            "from torch.autograd import forward_ad\nforward_ad._current_level",
            "torch.autograd.forward_ad._current_level",
        ),
        ("import torch.distributed as dist\ndist.distributed_c10d._world", "torch.distributed.distributed_c10d._world"),
        ("import torch\ngetattr(torch, '_foreach_lerp_')", "torch._foreach_lerp_"),
        ("import torch\ntorch.autograd.Function.apply.__func__", "torch.autograd.Function.apply.__func__"),
        ("import torch\napply = torch.autograd.Function.apply\napply.__code__", "Function.apply.__code__"),
        ("from diffusers import FluxPipeline as P\ngetattr(P.__call__, '__wrapped__')", "__wrapped__"),
        ("import sys\nsys.modules.get('torch._dynamo.config')", "torch._dynamo.config"),
        ("def f():\n    from diffusers.models._modeling_parallel import ContextParallelInput", "_modeling_parallel"),
    ],
)
def test_the_rule_finds(code: str, name: str) -> None:
    assert any(name in found for _, found in private_names(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        '"""Reads torch._dynamo.config."""',
        "from torch import nn\nnn.Module.forward",
        "import torch\ntorch.Tensor.__repr__",
        "from lightning_cp.compat.torch_names import tree_map\ntree_map(f, x)",
    ],
)
def test_the_rule_allows(code: str) -> None:
    assert not list(private_names(ast.parse(code)))
