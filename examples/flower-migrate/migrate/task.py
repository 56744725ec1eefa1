"""Model, data and training loop: plain PyTorch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedbat.data import load_dataset, normalize, partition_iid


class Net(nn.Module):
    """A small CNN."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(512, 120), nn.ReLU(), nn.Linear(120, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.head(self.features(x))


def load_data(partition_id: int, num_partitions: int) -> tuple[DataLoader, DataLoader]:
    """One client's training batches, and the test set."""
    data = load_dataset("fmnist-mini")
    mine = partition_iid(data.y_train.numpy(), num_partitions, seed=0)[partition_id]
    x_train = normalize(data.x_train[mine], data.spec.train_mean, data.spec.train_std)
    x_test = normalize(data.x_test, data.spec.test_mean, data.spec.test_std)
    trainloader = DataLoader(TensorDataset(x_train, data.y_train[mine]), batch_size=32, shuffle=True)
    return trainloader, DataLoader(TensorDataset(x_test, data.y_test), batch_size=500)


def train(net: Net, trainloader: DataLoader, epochs: int, lr: float, device: torch.device) -> float:
    """Train the model on the training set, and return the mean loss."""
    net.to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


@torch.no_grad()
def test(net: Net, testloader: DataLoader, device: torch.device) -> float:
    """Accuracy on the test set."""
    net.to(device).eval()
    correct = sum((net(images.to(device)).argmax(1).cpu() == labels).sum().item() for images, labels in testloader)
    return correct / len(testloader.dataset)
