"""Every method on a small real Fashion-MNIST run: within its recorded band, neither worse nor better."""

import json
import statistics

import pytest

from fedbat import METHODS
from tests.bands import RECORDS, SEEDS, measure

MAX_WIDTH = 6.0
BEATEN = ("signsgd", "noisy-signsgd", "stoc-signsgd")


def recorded(method):
    values = json.loads(RECORDS.read_text())[method]
    assert len(values) == len(SEEDS) == 5
    return values


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(METHODS))
def test_accuracy_is_in_its_band(method):
    """The first seed against mean +- 5 standard deviations of all five; FedBAT's and those it beats also against each
    other, as recorded for that seed.
    """
    values = recorded(method)
    half = 5 * statistics.stdev(values)
    assert 2 * half <= MAX_WIDTH, f"{method}: the band is {2 * half:.1f} points wide and says too little"
    accuracy = measure(method, seed=SEEDS[0])
    assert abs(accuracy - statistics.fmean(values)) <= half, method
    if method in BEATEN:
        assert accuracy < recorded("fedbat")[0]
    if method == "fedbat":
        assert accuracy > max(recorded(rival)[0] for rival in BEATEN)


@pytest.mark.parametrize("rival", BEATEN)
def test_fedbat_is_ahead_by_more_than_seed_noise(rival):
    """Paired by seed: both share split, start, sampled clients and batches."""
    gains = [ours - theirs for ours, theirs in zip(recorded("fedbat"), recorded(rival), strict=True)]
    assert statistics.fmean(gains) > 5 * statistics.stdev(gains) / len(gains) ** 0.5
