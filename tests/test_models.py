"""The paper's models: exact sizes and initial weights."""

import math

import pytest
import torch
from torch import nn

from fedbat import ConfigError, layout_of
from fedbat.models import build_model

SIZES = [
    ("cnn", (1, 28, 28), 10, 389_920, 5, 480),
    ("cnn", (3, 32, 32), 10, 398_176, 5, 480),
    ("resnet10", (3, 32, 32), 10, 4_897_472, 13, 2_880),
    ("resnet10", (3, 32, 32), 100, 4_943_552, 13, 2_880),
    ("resnet10-narrow", (3, 32, 32), 10, 1_226_080, 13, 1_440),
    ("resnet10-narrow", (3, 32, 32), 100, 1_249_120, 13, 1_440),
]


@pytest.mark.parametrize(("name", "shape", "classes", "weights", "layers", "channels"), SIZES)
def test_sizes(name, shape, classes, weights, layers, channels):
    model = build_model(name, shape, classes, seed=0)
    layout = layout_of(model)
    assert sum(e.numel for e in layout.compressed) == weights and len(layout.compressed) == layers
    assert sum(e.numel for e in layout.rest if e.role == "dense") == 4 * channels  # gamma, beta, mean, variance
    assert model(torch.zeros(2, *shape)).shape == (2, classes)
    assert not any(isinstance(m, nn.Conv2d | nn.Linear) and m.bias is not None for m in model.modules())


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    one = build_model("cnn", (1, 28, 28), 10, seed=5)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    two = build_model("cnn", (1, 28, 28), 10, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one[0].weight, build_model("cnn", (1, 28, 28), 10, seed=6)[0].weight)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is left alone
    weights = one[12].weight.flatten()
    assert abs(weights.std().item() - 0.01) < 5 * 0.01 / math.sqrt(2 * len(weights))


def test_own_start_of_the_papers_models_is_pytorchs():
    """Kaiming's uniform law with a = sqrt(5): within 1 / sqrt(fan-in), and filling it."""
    convolution = build_model("cnn", (1, 28, 28), 10, seed=5, init="own")[12].weight
    bound = 1 / math.sqrt(9 * 128)
    assert convolution.abs().max() <= bound and convolution.abs().max() > 0.99 * bound
    assert abs(convolution.std().item() - bound / math.sqrt(3)) < 5 * bound / math.sqrt(3 * convolution.numel())


def tiny(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), num_classes))


def test_own_model_by_path():
    assert isinstance(build_model(f"{__name__}:tiny", (1, 4, 4), 3, 0)[1], nn.Linear)
    for wrong in ("nope", "nope:nope", f"{__name__}:nope", ""):
        with pytest.raises(ConfigError, match="choose from cnn, resnet10"):
            build_model(wrong, (1, 4, 4), 3, 0)
