"""Models that fail or sleep on one rank."""

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_cp.recipes.digits.denoisers import WanDenoiser


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


class NappingDenoiser(WanDenoiser):
    """Sleeps in the third forward on rank 1 until a file exists, while its peers wait in attention."""

    def __init__(self, *, until: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.until = until
        self.forwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        while self.forwards == 3 and dist.get_rank() == 1 and not Path(self.until).exists():
            time.sleep(0.05)
        return super().forward(*args, **kwargs)
