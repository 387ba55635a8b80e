"""Log pictures with Lightning's loggers."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def log_picture(logger: Any, name: str, picture: NDArray[np.uint8], step: int) -> None:
    """Log a picture with a TensorBoard or W&B logger; other loggers, such as CSVLogger, take none.

    Args:
        logger: logger of lightning.pytorch or lightning.fabric.
        picture: [height, width, channels].
    """
    if hasattr(logger, "log_image"):
        logger.log_image(name, [picture], step)
    elif hasattr(logger.experiment, "add_image"):
        logger.experiment.add_image(name, picture, step, dataformats="HWC")
