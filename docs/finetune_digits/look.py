import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from lightning_cp.recipes.digits.recognise import recognise_digits

for folder in map(Path, sys.argv[1:]):
    files = sorted((folder / "samples").glob("*.png"))
    pictures = np.stack([np.asarray(Image.open(file).convert("L")) for file in files])
    pixels = torch.from_numpy(pictures).float()[:, None, None] / 127.5 - 1
    labels = torch.arange(len(files)) % 10
    light = (pixels > 0).float().mean().item()
    as_is, exchanged = (recognise_digits(x, labels).fraction for x in (pixels, -pixels))
    print(f"{folder}: {light:.0%} of the pixels are light; recognised {as_is:.0%}, exchanged {exchanged:.0%}")
