from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from lightning_cp.sampling.tiles import tile, write_png


def test_pictures_lie_in_rows_of_equal_length(tmp_path: Path) -> None:
    pictures = torch.linspace(-1, 1, 5).view(5, 1, 1, 1).expand(-1, 1, 4, 6)
    grid = tile(pictures)
    assert grid.shape == (2 * 4 + 2, 3 * 6 + 2 * 2, 3)
    assert grid[0, :6].unique().item() == 0
    assert grid[0, 8:14].unique().item() == 64
    assert grid[0, 16:22].unique().item() == 128
    assert grid[6, 8:14].unique().item() == 255
    assert grid[4:6].unique().item() == 255
    write_png(grid, tmp_path / "new" / "grid.png")
    assert (imread(tmp_path / "new" / "grid.png")[..., :3] * 255).round().astype("uint8").tolist() == grid.tolist()


def test_a_clip_is_a_row_of_frames_and_colours_stay() -> None:
    clips = torch.zeros(2, 3, 4, 5, 5)
    clips[1, 2, 3] = 7.0
    grid = tile(clips, value_range=(0, 1), margin=0)
    assert grid.shape == (10, 20, 3)
    assert grid[5:, 15:, 2].unique().item() == 255
    assert int(grid.sum()) == 255 * 25


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 5, 4, 4\)"):
        tile(torch.zeros(2, 5, 4, 4))
    with pytest.raises(ValueError, match=r"\(0, 3, 4, 4\)"):
        tile(torch.zeros(0, 3, 4, 4))
