"""What a user can choose (a method, a way down), as far as recorded, and what one choice gains over another."""

import itertools
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedbat.downlink import DOWNLINKS, FULL
from fedbat.reproduce.results import ROUNDING, WITHIN, Result, Results
from fedbat.reproduce.tables import Book, Row

TABLES = ("traffic", "table1", "table5")  # whose rows are choices; those of the others count at the places of the first
TOLERANCE = 0.5  # points that fewer bits may cost on average over places,
NOWHERE = WITHIN  # and at any one of them


class Choice(NamedTuple):
    """How updates and the model travel."""

    method: str  # with its settings and those of the protocol, as in "fedbat bits=2"
    down: str = FULL


class Place(NamedTuple):
    """Where a choice was tried."""

    dataset: str
    clients: str
    split: str


@dataclass(frozen=True)
class Compared:
    """What one choice gains over another, in points, wherever both were run."""

    points: Mapping[Place, float]

    @property
    def mean(self) -> float:
        """The mean over all places."""
        return statistics.fmean(self.points.values())

    @property
    def worst(self) -> Place:
        """The place where the choice loses most."""
        return min(self.points, key=lambda place: self.points[place])

    @property
    def within(self) -> bool:
        """Whether the choice costs little enough."""
        return costs_little(self.points.values())


def has_choices(book: Book) -> bool:
    """Whether these experiments have the tables that docs/choosing.md is about; those of one's own need not."""
    return book.tables.keys() >= set(TABLES)


class Choices:
    """The choices planned and run at each place."""

    def __init__(self, book: Book, results: Results) -> None:
        tables = [book.tables[name] for name in TABLES]
        self.places = tuple(dict.fromkeys(_place(row) for row in tables[0].rows))
        self.planned: dict[Place, list[Choice]] = {place: [] for place in self.places}  # of the first table
        self.found: dict[Place, dict[Choice, Result]] = {place: {} for place in self.places}
        for row in tables[0].rows:
            self.planned[_place(row)].append(_choice(row))
        for row in itertools.chain.from_iterable(table.rows for table in tables):
            result = results.training(row)
            if result and _place(row) in self.found:
                self.found[_place(row)].setdefault(_choice(row), result)

    def datasets(self) -> dict[tuple[str, str], list[Place]]:
        """The places by data set and number of clients."""
        by: dict[tuple[str, str], list[Place]] = {}
        for place in self.places:
            by.setdefault((place.dataset, place.clients), []).append(place)
        return by

    def splits(self) -> list[str]:
        """The splits of all places."""
        return list(dict.fromkeys(place.split for place in self.places))

    def of_split(self, split: str) -> list[Result]:
        """The results of all choices of the first table that were run on a split."""
        places = [place for place in self.places if place.split == split]
        planned = ((place, choice) for place in places for choice in self.planned[place])
        return [self.found[place][choice] for place, choice in planned if choice in self.found[place]]

    def of(self, choice: Choice, places: Sequence[Place]) -> list[Result]:
        """The results of a choice at these places."""
        return [result for place in places if (result := self.found[place].get(choice))]

    def listed(self, places: Sequence[Place]) -> list[Choice]:
        """The choices with a record at one of these places, in the tables' order, then from many bits down to few."""
        found = list(dict.fromkeys(choice for place in places for choice in self.found[place]))
        planned = list(dict.fromkeys(choice for place in places for choice in self.planned[place]))
        methods = list(dict.fromkeys(choice.method for choice in [*planned, *found]))
        return sorted(found, key=lambda choice: (methods.index(choice.method), list(DOWNLINKS).index(choice.down)))

    def compare(self, one: Choice, other: Choice, split: str | None = None) -> Compared:
        """Differences between runs of the same seed, averaged over seeds, at every place or at those of a split."""
        points = {}
        for place in self.places:
            a, b = (self.found[place].get(choice) for choice in (one, other))
            if a and b and split in (None, place.split):
                differences = _differences(a, b)
                if differences:
                    points[place] = statistics.fmean(differences)
        return Compared(points)


def costs_little(points: Collection[float]) -> bool:
    """Whether these differences are small enough, both on average and at worst."""
    return statistics.fmean(points) >= -TOLERANCE - ROUNDING and min(points) >= -NOWHERE - ROUNDING


def fewest_bits(tried: Mapping[str, Compared]) -> str | None:
    """The last, from many bits to few, before one that costs too much; only those tried wherever any was count."""
    everywhere = {place for compared in tried.values() for place in compared.points}
    whole = {name: compared for name, compared in tried.items() if everywhere and compared.points.keys() == everywhere}
    good = list(itertools.takewhile(lambda name: whole[name].within, whole))
    return good[-1] if good else None


def _differences(one: Result, other: Result) -> list[float]:
    """By seed, differences in the averaged model's last ten rounds, which vary least, or in the model's."""
    pairs = [(record, other.by_seed[seed]) for seed, record in one.by_seed.items() if seed in other.by_seed]
    kept = [(a.last10_of("averaged"), b.last10_of("averaged")) for a, b in pairs]
    averaged = [x - y for x, y in kept if x is not None and y is not None]
    return averaged if len(averaged) == len(pairs) else [a.last10 - b.last10 for a, b in pairs]


def _place(row: Row) -> Place:
    return Place(*(row.point[key] for key in Place._fields))


def _choice(row: Row) -> Choice:
    return Choice(row.protocol.spelled(row.point["method"]), row.point.get("down", FULL))
