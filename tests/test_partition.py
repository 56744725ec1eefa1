"""Partitions: laws of all, regression values of the paper's, and errors that help."""

import tracemalloc
from math import ceil, inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbat.data import (
    PARTITIONS,
    Population,
    partition,
    partition_dirichlet,
    partition_labels,
    partition_labels_balanced,
)
from fedbat.data.partition import _draw_dirichlet
from fedbat.errors import ConfigError, DataError

DEALT = ["dirichlet", "iid", "labels", "labels-balanced"]  # every sample belongs to one client


def balanced_labels(num_samples, num_classes):
    return np.repeat(np.arange(num_classes), num_samples // num_classes)


def label_sets(labels, parts):
    return [tuple(np.unique(labels[part])) for part in parts]


def slow_dirichlet(labels, num_clients, seed, beta):
    """NIID-Bench's loop on Python lists and the global stream."""
    np.random.seed(seed)
    smallest = 0
    while smallest < 10:
        clients = [[] for _ in range(num_clients)]
        for label in sorted(set(labels.tolist())):
            indices = np.where(labels == label)[0]
            np.random.shuffle(indices)
            p = np.random.dirichlet(np.repeat(beta, num_clients))
            full = [len(held) >= len(labels) / num_clients for held in clients]
            p = np.array([0.0 if f else q for q, f in zip(p, full, strict=True)])
            p = p / p.sum()
            cuts = (np.cumsum(p) * len(indices)).astype(int)[:-1]
            for held, new in zip(clients, np.split(indices, cuts), strict=True):
                held.extend(new.tolist())
        smallest = min(map(len, clients))
    for held in clients:
        np.random.shuffle(held)
    return clients


def slow_balanced_holders(num_clients, num_classes, k):
    """Each client takes, one by one, the least used label it does not have yet."""
    times = [0] * num_classes
    sets = []
    for _ in range(num_clients):
        mine = sorted(range(num_classes), key=lambda label: (times[label], label))[:k]
        for label in mine:
            times[label] += 1
        sets.append(tuple(sorted(mine)))
    return sets


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DEALT),
    st.integers(1, 8),
    st.integers(2, 6),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_every_sample_is_used_exactly_once_and_the_seed_decides(name, num_clients, num_classes, seed, data):
    counts = data.draw(st.lists(st.integers(80, 150), min_size=num_classes, max_size=num_classes))
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(num_classes), counts))
    k = data.draw(st.integers(ceil(num_classes / num_clients), num_classes))
    try:
        parts = partition(name, labels, num_clients, seed, beta=1.0, labels_per_client=k)
    except DataError as err:  # the draw of labels may have no solution within its limit
        assert name == "labels" and "without a holder" in str(err)
        return
    assert len(parts) == num_clients and min(map(len, parts)) > 0
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    again = partition(name, labels, num_clients, seed, beta=1.0, labels_per_client=k)
    assert all(map(np.array_equal, parts, again))


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_another_seed_gives_other_clients_and_leaves_the_global_stream_alone(name):
    labels = balanced_labels(1000, 10)
    before = np.random.get_state()[1].copy()
    first, second = (partition(name, labels, 5, seed)[0] for seed in (1, 2))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_iid_sizes_differ_by_at_most_one():
    sizes = [len(part) for part in partition("iid", balanced_labels(1000, 10), 7)]
    assert max(sizes) - min(sizes) == 1


# seed 1234: samples, classes, beta, clients; then min/median/max samples and labels of a client, range of tau
SIZES = [
    (60_000, 10, 0.3, 30, (556, 2103.5, 3737), (1, 8, 10), (90, 590)),
    (60_000, 10, 0.3, 100, (133, 610, 1744), (1, 8, 10), (30, 280)),
    (60_000, 10, 0.3, 200, (57, 311, 736), (1, 7, 10), (10, 120)),
    (50_000, 10, 0.3, 30, (563, 1722.5, 3067), (3, 8, 10), (90, 480)),
    (50_000, 10, 0.3, 100, (89, 508.5, 1648), (2, 8, 10), (20, 260)),
    (50_000, 10, 0.3, 200, (45, 258, 676), (1, 7, 10), (10, 110)),
    (50_000, 100, 0.1, 30, (1153, 1687.5, 1940), (29, 42, 66), (190, 310)),
    (50_000, 100, 0.1, 100, (162, 510.5, 690), (19, 31, 79), (30, 110)),
    (50_000, 100, 0.1, 200, (126, 255, 399), (12, 29, 82), (20, 70)),
]


@pytest.mark.parametrize(("num_samples", "num_classes", "beta", "num_clients", "sizes", "num_labels", "steps"), SIZES)
def test_dirichlet_gives_the_authors_clients(num_samples, num_classes, beta, num_clients, sizes, num_labels, steps):
    labels = balanced_labels(num_samples, num_classes)
    parts = partition("dirichlet", labels, num_clients, beta=beta)
    n = [len(part) for part in parts]
    held = [len(label_set) for label_set in label_sets(labels, parts)]
    tau = [10 * ceil(size / 64) for size in n]
    assert (min(n), np.median(n), max(n)) == sizes
    assert (min(held), np.median(held), max(held)) == num_labels
    assert (min(tau), max(tau)) == steps


@pytest.mark.parametrize(("num_clients", "seed", "beta"), [(10, 1234, 0.3), (10, 0, 0.1), (50, 5, 0.5), (3, 1, 50)])
def test_dirichlet_equals_its_twin_sample_by_sample(num_clients, seed, beta):
    labels = np.random.default_rng(0).permutation(balanced_labels(2000, 10))
    state = np.random.get_state()
    expected = slow_dirichlet(labels, num_clients, seed, beta)
    np.random.set_state(state)
    parts = partition_dirichlet(labels, num_clients, seed, beta)
    assert [part.tolist() for part in parts] == expected


def test_dirichlet_draws_again_until_everyone_has_ten():
    labels = balanced_labels(1000, 10)
    first_draw = _draw_dirichlet(labels, 50, np.random.RandomState(5), beta=0.5)
    assert min(map(len, first_draw)) < 10
    assert min(map(len, partition_dirichlet(labels, 50, seed=5, beta=0.5))) >= 10


def test_dirichlet_gives_a_full_client_nothing_more():
    labels = balanced_labels(5000, 10)
    for part in partition_dirichlet(labels, 20, seed=3, beta=0.3):
        counts = np.bincount(labels[part], minlength=10)
        last = counts.nonzero()[0][-1]
        assert counts[:last].sum() < 5000 / 20


@pytest.mark.parametrize("beta", [1e-2, 1e-5, 1e-300])
def test_dirichlet_gives_up(beta):
    with pytest.raises(DataError, match=f"in each of 1000 draws, expected .* use a beta above {beta}"):
        partition_dirichlet(balanced_labels(1000, 10), 50, seed=0, beta=beta)


def test_dirichlet_needs_ten_samples_for_each():
    with pytest.raises(DataError, match="got 100 samples for 11 clients, expected at least 10"):
        partition("dirichlet", balanced_labels(100, 10), 11)


@pytest.mark.parametrize(("num_classes", "k"), [(10, 3), (100, 10)])
@pytest.mark.parametrize("num_clients", [30, 100, 200])
def test_labels_balanced_has_ten_label_sets(num_classes, k, num_clients):
    labels = balanced_labels(50_000, num_classes)
    sets = label_sets(labels, partition_labels_balanced(labels, num_clients, 1234, k))
    assert {len(label_set) for label_set in sets} == {k}
    assert len(set(sets)) == 10
    assert sets == slow_balanced_holders(num_clients, num_classes, k)


def test_labels_balanced_starts_as_documented():
    labels = balanced_labels(1000, 10)
    sets = label_sets(labels, partition_labels_balanced(labels, 10, 0, 3))
    assert sets[:4] == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 1, 9)]


@pytest.mark.parametrize("name", ["labels", "labels-balanced"])
@pytest.mark.parametrize(("num_classes", "k"), [(10, 3), (100, 10)])
@pytest.mark.parametrize("num_clients", [30, 100, 200])
def test_labels_are_shared_equally_by_their_holders(name, num_classes, k, num_clients):
    labels = balanced_labels(50_000, num_classes)
    parts = partition(name, labels, num_clients, labels_per_client=k)
    counts = np.stack([np.bincount(labels[part], minlength=num_classes) for part in parts])
    assert ((counts > 0).sum(axis=1) == k).all()
    for column in counts.T:
        shares = column[column > 0]
        assert shares.max() - shares.min() <= 1


def test_random_labels_are_many_different_sets():
    labels = balanced_labels(50_000, 10)
    parts = partition_labels(labels, 100, 1234, 3)
    # 100 draws of one of C(10, 3) = 120 sets: 68 different ones expected, standard deviation below 4
    assert 48 <= len(set(label_sets(labels, parts))) <= 88


def test_random_labels_give_up():
    with pytest.raises(DataError, match="without a holder in each of 1000 draws of 1 labels for 20 clients"):
        partition_labels(balanced_labels(1000, 20), 20, 0, 1)  # 20! / 20^20 = 2e-8 of the draws would do


@pytest.mark.parametrize("name", ["labels", "labels-balanced"])
def test_labels_need_enough_holders(name):
    with pytest.raises(DataError, match="got 3 clients with 3 labels each, expected a holder for all 10"):
        partition(name, balanced_labels(1000, 10), 3)


@pytest.mark.parametrize("name", ["labels", "labels-balanced"])
def test_empty_client_is_refused(name):
    labels = np.array([0] * 100 + [1])  # one sample of class 1, for some 25 holders
    with pytest.raises(DataError, match=r"clients without samples, .* fewer clients or fewer labels"):
        partition(name, labels, 50, labels_per_client=1)


@pytest.mark.parametrize(
    ("name", "settings_", "message"),
    [
        ("dirichlet", {"beta": 0.0}, "got beta 0.0, expected a positive number"),
        ("dirichlet", {"beta": -1.0}, "got beta -1.0"),
        ("dirichlet", {"beta": nan}, "got beta nan"),
        ("dirichlet", {"beta": inf}, "got beta inf"),
        ("labels", {"labels_per_client": 0}, "got 0 labels per client for 10 classes"),
        ("labels", {"labels_per_client": 11}, "got 11 labels per client"),
        ("labels-balanced", {"labels_per_client": 0}, "got 0 labels per client"),
        ("labels-balanced", {"labels_per_client": 11}, "got 11 labels per client"),
        ("label", {}, "'label'; choose from dirichlet, iid, labels, labels-balanced, virtual, virtual-iid"),
        *((name, {"num_clients": 0}, "got 0 clients for 1000 samples") for name in DEALT),
        *((name, {"num_clients": 1001}, "got 1001 clients for 1000 samples") for name in DEALT),
        ("virtual", {"num_clients": 0}, "got 0 clients, expected at least 1"),
        ("virtual", {"beta": 0.0}, "got beta 0.0, expected a positive number; virtual-iid"),
        ("virtual", {"samples": 63}, "got 63 samples for each virtual client, expected 64 to 100"),
        ("virtual-iid", {"samples": 101}, "got 101 samples for each virtual client, expected 64 to 100"),
    ],
)
def test_impossible_settings_are_refused(name, settings_, message):
    with pytest.raises(ConfigError, match=message):
        partition(name, balanced_labels(1000, 10), **({"num_clients": 10} | settings_))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(70, 200), min_size=1, max_size=12),
    st.integers(64, 70),
    st.sampled_from([None, 1e-6, 0.01, 0.3, 1.0, 1e3]),
    st.integers(0, 2**32 - 1),
)
def test_virtual_clients_hold_different_samples_that_depend_on_seed_and_client_alone(counts, samples, beta, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    population = Population(labels, 10**9, seed, samples, beta)
    for client in (0, 1, 10**9 - 1):
        held = population[client]
        assert len(held) == len(set(held.tolist())) == samples == population.most_samples
        assert held.min() >= 0 and held.max() < len(labels) and held.dtype == np.int64
        np.testing.assert_array_equal(held, population[client])
    np.testing.assert_array_equal(population[1], Population(labels, 2, seed, samples, beta)[1])
    others = population[1], Population(labels, 2, seed ^ 1, samples, beta)[0]
    assert all(not np.array_equal(population[0], other) for other in others) or len(labels) == samples


@pytest.mark.parametrize("beta", [0.1, 0.3, 5.0, None])
def test_virtual_label_shares_have_the_mean_and_the_variance_of_their_law(beta):
    """Counts of a class are Dirichlet-multinomial, alpha_c = beta C p_c; without beta they are multinomial."""
    sizes, samples, num_clients = np.array([200, 100, 100]), 64, 4000
    labels = np.repeat(np.arange(3), sizes)
    population = Population(labels, num_clients, 1, samples, beta)
    counts = np.stack([np.bincount(labels[held], minlength=3) for held in population])
    p = sizes / sizes.sum()
    a = inf if beta is None else 3 * beta
    variance = samples * p * (1 - p) * (1 if beta is None else (samples + a) / (1 + a))
    deviation = (counts - samples * p) ** 2
    assert (abs(counts.mean(axis=0) - samples * p) < 5 * np.sqrt(variance / num_clients)).all()
    error = deviation.std(axis=0) / num_clients**0.5
    assert (abs(deviation.mean(axis=0) - variance) < 5 * error).all()


def test_virtual_clients_cost_nothing_before_they_are_asked():
    labels = balanced_labels(50_000, 10)
    tracemalloc.start()
    population = partition("virtual", labels, 10**6)
    assert len(population) == 10**6
    assert tracemalloc.get_traced_memory()[1] < 4 * labels.nbytes
    tracemalloc.stop()
    for outside in (-1, 10**6):
        with pytest.raises(IndexError, match="expected 0 to 999999"):
            population[outside]
    assert partition("iid", labels, 7).most_samples == 7143
