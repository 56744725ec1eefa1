"""Models that only the checks of the CUDA engine train."""

from torch import nn


def dropping(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Draws numbers of its own, so that its steps are not recorded."""
    channels, height, width = shape
    features = 8 * (height // 2) * (width // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(0.3), nn.Linear(features, num_classes),
    )  # fmt: skip
