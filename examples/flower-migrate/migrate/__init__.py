"""A plain Flower app in PyTorch."""
