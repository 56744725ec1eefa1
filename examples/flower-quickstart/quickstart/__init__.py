"""The FedBAT paper's CNN on Flower, one bit per weight."""
