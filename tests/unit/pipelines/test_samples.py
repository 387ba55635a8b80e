"""Arguments of a call whose samples do not fit together are an error, as in one process."""

from __future__ import annotations

import pytest
import torch

from lightning_cp.errors import ShapeError
from lightning_cp.pipelines.samples import select_samples


@pytest.mark.parametrize(("name", "shape"), [("encoder_hidden_states", (2, 5, 8)), ("pooled_projections", (3, 8))])
def test_texts_of_another_number_of_samples_are_refused(name: str, shape: tuple[int, ...]) -> None:
    given = {"hidden_states": torch.ones(4, 6, 8), name: torch.ones(shape)}
    with pytest.raises(ShapeError, match=f"{name} has {shape[0]} samples and the latents have 4"):
        select_samples(given, 4, slice(2, 4), of_lists=False)
    given[name] = torch.ones(4, *shape[1:])
    assert {len(x) for x in select_samples(given, 4, slice(2, 4), of_lists=False).values()} == {2}
    given[name] = torch.ones(1, *shape[1:])  # one text for all samples
    assert len(select_samples(given, 4, slice(2, 4), of_lists=False)[name]) == 1
