"""Pictures show the right cells in the right place, at every size."""

import sys

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from fedbat.plots.partition import _SHADES, draw_partition


def darkest(path):
    """Row and column, as shares of the picture, of the pixels with the darkest shade."""
    pixels = imread(path)[..., :3]
    return np.argwhere(np.abs(pixels - to_rgb(_SHADES[-1])).max(axis=2) < 0.01) / pixels.shape[:2]


def test_client_zero_is_at_the_top_and_class_zero_at_the_left(tmp_path):
    draw_partition(np.diag([50, 50]), "diagonal", tmp_path / "diagonal.png")
    rows, cols = darkest(tmp_path / "diagonal.png").T
    assert cols[rows == rows.min()].max() < cols[rows == rows.max()].min()


def test_zero_is_blank_and_more_is_darker(tmp_path):
    draw_partition(np.array([[900, 0, 30]]), "one client", tmp_path / "row.png")
    pixels = imread(tmp_path / "row.png")[..., :3]
    dark = darkest(tmp_path / "row.png")
    assert dark[:, 1].max() < 0.3  # only the first of the three cells
    row = pixels[round(np.median(dark[:, 0]) * len(pixels))]
    first, second, third = (row[round(share * len(row))] for share in (0.08, 0.33, 0.58))  # left of the numbers
    assert first.sum() < third.sum() < second.sum() == 3


def test_the_same_split_gives_the_same_file(tmp_path):
    for name in ("a", "b"):
        draw_partition(np.diag([50, 50]), "diagonal", tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(("num_clients", "num_classes"), [(1, 2), (10, 10), (30, 100), (200, 100)])
def test_every_size_can_be_drawn(tmp_path, num_clients, num_classes):
    counts = np.random.default_rng(0).poisson(1.0, (num_clients, num_classes)) * 40
    pyplot_before = "matplotlib.pyplot" in sys.modules
    draw_partition(counts, f"{num_clients} x {num_classes}", tmp_path / "picture.png")
    height, width, _ = imread(tmp_path / "picture.png").shape
    assert width == 1425 and 270 <= height <= 1500
    assert len(darkest(tmp_path / "picture.png"))
    assert ("matplotlib.pyplot" in sys.modules) == pyplot_before
