"""The paper's ResNet-10: a 3x3 stem without pooling and four basic blocks."""

from collections.abc import Sequence

from torch import Tensor, nn

from fedbat.models.norm import BatchNormReLU


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, 1x1 where the shape changes."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = BatchNormReLU(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = BatchNormReLU(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """Residual block of He et al. 2016."""
        y: Tensor = self.bn1(self.conv1(x))
        y = self.bn2(self.conv2(y), self.shortcut(x))
        return y


class ResNet10(nn.Module):
    """One basic block per width, strides 1, 2, 2, 2."""

    def __init__(self, shape: tuple[int, int, int], num_classes: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(shape[0], widths[0], 3, padding=1, bias=False)
        self.bn1 = BatchNormReLU(widths[0])
        before = (widths[0], *widths)
        self.blocks = nn.Sequential(*(BasicBlock(before[i], out, 1 if i == 0 else 2) for i, out in enumerate(widths)))
        self.linear = nn.Linear(widths[-1], num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        features: Tensor = self.blocks(self.bn1(self.conv1(x)))
        logits: Tensor = self.linear(features.mean((2, 3)))
        return logits


def resnet10(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Widths 64 to 512 as in the authors' code, which give the paper's accuracies."""
    return ResNet10(shape, num_classes, (64, 128, 256, 512))


def resnet10_narrow(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Widths 32 to 256 as in the paper's Table 4."""
    return ResNet10(shape, num_classes, (32, 64, 128, 256))
