"""The paper's CNN and a small Fashion-MNIST that ships with fedbat, split unevenly."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedbat.data import load_dataset, normalize, partition
from fedbat.models import build_model

DATA = load_dataset("fmnist-mini")
SPEC = DATA.spec


def new_model(seed: int = 0) -> nn.Module:
    """The CNN with its initial weights."""
    return build_model("cnn", SPEC.shape, SPEC.num_classes, seed)


def train_batches(client: int, num_clients: int, batch_size: int) -> DataLoader:
    """What one client holds."""
    mine = partition("dirichlet", DATA.y_train.numpy(), num_clients)[client]
    x = normalize(DATA.x_train[mine], SPEC.train_mean, SPEC.train_std)
    return DataLoader(TensorDataset(x, DATA.y_train[mine]), batch_size, shuffle=True)


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """Accuracy on the test set."""
    logits = model.eval()(normalize(DATA.x_test, SPEC.test_mean, SPEC.test_std))
    return (logits.argmax(1) == DATA.y_test).float().mean().item()
