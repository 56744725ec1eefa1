"""Federated learning that sends one bit per weight."""
