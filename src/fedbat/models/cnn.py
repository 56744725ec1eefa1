"""The paper's CNN (Table 4), for 28x28 and 32x32 images."""

from torch import nn


def cnn(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Four blocks of convolution 3x3, BatchNorm, ReLU, max-pool 2, then a linear layer; no biases."""
    channels, height, width = shape
    layers: list[nn.Module] = []
    for out in (32, 64, 128, 256):
        layers += [
            nn.Conv2d(channels, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        ]
        channels, height, width = out, height // 2, width // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, num_classes, bias=False))
