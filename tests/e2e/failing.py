"""A model that fails on one rank."""

from typing import Any

import torch.distributed as dist

from lightning_cp.training import WanDenoiser


class FailingDenoiser(WanDenoiser):
    """Raises in the third forward on rank `fails_on`."""

    def __init__(self, *, fails_on: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.fails_on = fails_on
        self.forwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        if self.forwards == 3 and dist.get_rank() == self.fails_on:
            raise ZeroDivisionError("the third forward fails")
        return super().forward(*args, **kwargs)
