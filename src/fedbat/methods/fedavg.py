"""FedAvg: "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, arXiv 1602.05629.

The update travels in full precision (Eq. 2 of the FedBAT paper). FedAvg is the base class itself: every other file
here describes how a paper departs from it.
"""

from dataclasses import dataclass

from fedbat.method import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """Full precision: w <- w + sum_k p'_k m_k."""
