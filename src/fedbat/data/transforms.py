"""What happens to images between storage and model: pure functions, on whatever device the images are."""

import torch
from torch import Tensor
from torch.nn import functional as F

PADDING = 4


def normalize(x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Scale uint8 images [..., C, H, W] to [0, 1], then to (x - mean) / std per channel, in float32."""
    center = torch.tensor(mean, dtype=torch.float32, device=x.device)[:, None, None]  # [C, 1, 1]
    scale = torch.tensor(std, dtype=torch.float32, device=x.device)[:, None, None]
    return (x.float() / 255 - center) / scale


def augment(x: Tensor, crop: Tensor, flip: Tensor) -> Tensor:
    """Crop each image of [B, C, H, W] out of its zero-padded self, then mirror it left to right where `flip` says so.

    `crop` [B, 2] holds the top and left of each window, integers in 0..8, where 4 gives the image back; `flip` [B]
    is bool. Meant for raw images, so that the padding is black: zero is no longer black once normalized.
    """
    num, channels, height, width = x.shape
    rows = crop[:, :1] + torch.arange(height, device=x.device)  # [B, H]
    cols = crop[:, 1:] + torch.arange(width, device=x.device)  # [B, W]
    cols = torch.where(flip[:, None], cols.flip(1), cols)
    image = torch.arange(num, device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[:, None, None]
    padded = F.pad(x, (PADDING,) * 4)
    return padded[image, channel, rows[:, None, :, None], cols[:, None, None, :]]
