"""Pictures show the right cells in the right place, at every size."""

import sys

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from fedbat.data.picture import _SHADES, draw_partition


def darkest(path):
    """Row and column, as shares of the picture, of the pixels with the darkest shade."""
    pixels = imread(path)[..., :3]
    return np.argwhere(np.abs(pixels - to_rgb(_SHADES[-1])).max(axis=2) < 0.01) / pixels.shape[:2]


def test_client_zero_is_at_the_top_and_class_zero_at_the_left(tmp_path):
    draw_partition(np.diag([50, 50]), "diagonal", tmp_path / "diagonal.png")
    rows, cols = darkest(tmp_path / "diagonal.png").T
    left = cols < 0.4  # the bars take the right of the picture
    assert left.any() and not left.all()
    assert rows[left].max() < rows[~left].min()


def test_zero_is_blank_and_more_is_darker(tmp_path):
    draw_partition(np.array([[900, 0, 30]]), "one client", tmp_path / "row.png")
    pixels = imread(tmp_path / "row.png")[..., :3]
    middle = pixels[darkest(tmp_path / "row.png")[:, 0].size and pixels.shape[0] // 2]
    assert darkest(tmp_path / "row.png")[:, 1].max() < 0.3  # only the first of the three cells
    assert (middle == 1).all(axis=1).mean() > 0.25  # the cell in the middle is white


@pytest.mark.parametrize(("num_clients", "num_classes"), [(1, 2), (10, 10), (30, 100), (200, 100)])
def test_every_size_can_be_drawn(tmp_path, num_clients, num_classes):
    counts = np.random.default_rng(0).poisson(1.0, (num_clients, num_classes)) * 40
    pyplot_before = "matplotlib.pyplot" in sys.modules
    draw_partition(counts, f"{num_clients} x {num_classes}", tmp_path / "picture.png")
    height, width, _ = imread(tmp_path / "picture.png").shape
    assert width == 1425 and 270 <= height <= 1500
    assert len(darkest(tmp_path / "picture.png"))
    assert ("matplotlib.pyplot" in sys.modules) == pyplot_before
