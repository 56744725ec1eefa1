"""Transforms equal their slow, obvious twins."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbat.data.transforms import augment, normalize


def slow_augment(x, crop, flip):
    out = []
    for image, (top, left), mirrored in zip(x.numpy(), crop.tolist(), flip.tolist(), strict=True):
        padded = np.pad(image, ((0, 0), (4, 4), (4, 4)))
        window = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
        out.append(window[:, :, ::-1] if mirrored else window)
    return torch.from_numpy(np.stack(out))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([torch.uint8, torch.float32]),
    st.integers(0, 2**32),
)
def test_augment_equals_its_twin(num, channels, height, width, dtype, seed):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 256, (num, channels, height, width), generator=rng).to(dtype)
    crop = torch.randint(0, 9, (num, 2), generator=rng)
    flip = torch.rand(num, generator=rng) < 0.5
    result = augment(x, crop, flip)
    assert result.dtype == dtype
    assert torch.equal(result, slow_augment(x, crop, flip))


def test_augment_by_hand():
    x = torch.arange(1, 10, dtype=torch.uint8).reshape(1, 1, 3, 3)
    down_right = augment(x, torch.tensor([[5, 6]]), torch.tensor([False]))
    assert down_right.squeeze().tolist() == [[6, 0, 0], [9, 0, 0], [0, 0, 0]]
    mirrored = augment(x, torch.tensor([[4, 4]]), torch.tensor([True]))
    assert mirrored.squeeze().tolist() == [[3, 2, 1], [6, 5, 4], [9, 8, 7]]


def test_augment_leaves_a_centred_window_as_it_is():
    x = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(augment(x, torch.full((5, 2), 4), torch.zeros(5, dtype=torch.bool)), x)


@pytest.mark.parametrize("lead", [(), (4,), (2, 3)])
def test_normalize_equals_its_twin(lead):
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    x = torch.randint(0, 256, (*lead, 3, 5, 7), dtype=torch.uint8)
    result = normalize(x, mean, std)
    assert result.dtype == torch.float32 and result.shape == x.shape
    for channel in range(3):
        expected = (x[..., channel, :, :].double() / 255 - mean[channel]) / std[channel]
        torch.testing.assert_close(result[..., channel, :, :].double(), expected, rtol=0, atol=1e-6)
