"""Nested values: names of leaves, and replacement of leaves."""

from __future__ import annotations

from collections import OrderedDict
from fractions import Fraction
from typing import NamedTuple

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from lightning_cp.nest import named_leaves, named_tensors, of_type, replace, tensors


class Pair(NamedTuple):
    first: object
    second: object


class Settings(dict[str, object]):
    """A subclass of dict that pytree does not know."""


A, B, C = (torch.full((2,), float(i)) for i in range(3))


def test_leaves_have_the_names_that_python_would_give_them() -> None:
    nest = {"x": [A, (1, None)], "kwargs": Settings(scale=2.0, mask=B), "output": Transformer2DModelOutput(sample=C)}
    names = ["x[0]", "x[1][0]", "x[1][1]", "kwargs['scale']", "kwargs['mask']", "output['sample']"]
    assert [name for name, _ in named_leaves("", nest)] == names
    assert [name for name, _ in named_leaves("arg", [A, {"b": 1}])] == ["arg[0]", "arg[1]['b']"]
    assert dict(named_tensors("", nest)) == {"x[0]": A, "kwargs['mask']": B, "output['sample']": C}
    assert list(tensors(nest)) == [A, B, C]


def test_leaves_of_a_type_are_replaced_and_the_structure_stays() -> None:
    nest = (Pair(Fraction(1, 2), [Fraction(3)]), {"a": "text", "b": OrderedDict(c=Fraction(5))}, A)
    assert list(of_type(Fraction, nest)) == [Fraction(1, 2), Fraction(3), Fraction(5)]
    replaced = replace(Fraction, float, nest)
    assert replaced == (Pair(0.5, [3.0]), {"a": "text", "b": OrderedDict(c=5.0)}, A)
    assert nest[0].first == Fraction(1, 2)
    assert replace(Fraction, float, Fraction(7)) == 7.0


def test_a_nest_without_such_a_leaf_is_returned_itself_and_a_diffusers_output_is_changed_in_place() -> None:
    cache = [None, {"x": A}]
    assert replace(Fraction, float, cache) is cache
    assert replace(object, str, [None, 1]) == ["None", "1"], "None is a leaf, too"
    output = Transformer2DModelOutput(sample=A)
    assert replace(torch.Tensor, lambda x: x + 1, output) is output
    assert torch.equal(output.sample, A + 1)
    assert torch.equal(output["sample"], A + 1)
