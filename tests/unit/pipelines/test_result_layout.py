"""Forms of results that another rank has sent."""

from __future__ import annotations

import pickle
from unittest import mock

import torch

from lightning_cp.pipelines.result_layout import Form, form_and_tensors, unpickled_quietly


def test_a_form_of_another_rank_has_this_ranks_device() -> None:
    form, _ = form_and_tensors((torch.zeros(2, 3), "rest"))
    sent = pickle.dumps(Form(form.spec, form.layout, torch.device("cuda", 3), form.rest, form.is_tensor))
    with mock.patch("torch.cuda.current_device", return_value=1), unpickled_quietly():
        found = pickle.loads(sent)
    assert found.device == torch.device("cuda", 1)
    assert (found.layout, found.rest) == (form.layout, form.rest)
    assert found.filled([torch.ones(2, 3)])[1] == "rest"
