"""How many bits down: the width that the measurements support."""

import statistics
from collections.abc import Iterator

from fedbat.downlink import FOLLOW, SNAPSHOTS
from fedbat.reproduce.choosing.choices import (
    NOWHERE,
    TOLERANCE,
    Choice,
    Choices,
    Compared,
    Place,
    costs_little,
    fewest_bits,
)
from fedbat.reproduce.choosing.words import NOT_YET, coverage, kilobytes, num_bytes, paragraph, signed, where
from fedbat.reproduce.markdown import table

TRIED_ON = "fedbat"  # the method run with every width
ANY = "3"  # shown as long as no width is recommended
RULE = f"at most {TOLERANCE:g} points on average and {NOWHERE:g} point on any split"


def recommended_width(choices: Choices) -> str | None:
    """The recommended snapshot width; None until every kind of split was tried: on unskewed labels all cost little."""
    return None if _untried(choices) else fewest_bits(_by_width(choices))


def width(choices: Choices) -> Iterator[str]:
    """The recommendation, as a paragraph."""
    most = max(_by_width(choices).values(), key=lambda compared: len(compared.points))
    best = recommended_width(choices)
    if not most.points:
        yield paragraph(
            f"**Recommended width: {NOT_YET}.** It will be the narrowest that costs FedBAT {RULE} against 32 bits "
            f"down; `fedbat reproduce traffic` makes the records, on {len(choices.places)} splits."
        )
    elif untried := _untried(choices):
        yield paragraph(
            f"**Recommended width: not settled.** It will be the narrowest that costs FedBAT {RULE} against 32 bits "
            f"down; {coverage(list(most.points), choices.places)}, and on none that is {' or '.join(untried)}."
        )
    elif best is None:
        tried = coverage(list(most.points), choices.places)
        yield paragraph(
            f"**No width is recommended.** None keeps what FedBAT loses against 32 bits down to {RULE} ({tried})."
        )
    else:
        found = _by_width(choices)[best]
        yield paragraph(
            f"**Recommended: `--down {best}`**, the narrowest that costs FedBAT {RULE} against 32 bits down: "
            f"{signed(found.mean)} points on average, at worst {_worst(found)}; "
            f"{coverage(list(found.points), choices.places)}.{_for_others(choices, best)}"
        )


def widths(choices: Choices) -> Iterator[str]:
    """A table of what each way down costs compared with 32 bits, and what it sends."""
    datasets = choices.datasets()
    rows = []
    for way in (*SNAPSHOTS, FOLLOW):
        found = choices.compare(Choice(TRIED_ON, way), Choice(TRIED_ON))
        if found.points:
            runs = [choices.of(Choice(TRIED_ON, way), places) for places in datasets.values()]
            down = [kilobytes(num_bytes(results, "down")) if results else "" for results in runs]
            splits = f"{len(found.points)} of {len(choices.places)}"
            rows.append([f"`{way}`", signed(found.mean), _worst(found), _others(choices, way), splits, *down])
    words = ("`--down`", "at worst")
    header = ("`--down`", "FedBAT", "at worst", "other methods", "splits", *(f"kB, {name}" for name, _ in datasets))
    yield from table(header, rows, words) if rows else [f"What each way down costs and sends: {NOT_YET}."]


def _by_width(choices: Choices) -> dict[str, Compared]:
    return {width: choices.compare(Choice(TRIED_ON, width), Choice(TRIED_ON)) for width in SNAPSHOTS}


def _untried(choices: Choices) -> list[str]:
    """The kinds of split on which no width was tried."""
    tried = {place.split for compared in _by_width(choices).values() for place in compared.points}
    return [split for split in dict.fromkeys(place.split for place in choices.places) if split not in tried]


def _worst(found: Compared) -> str:
    return f"{signed(found.points[found.worst])} ({where(found.worst)})"


def _others(choices: Choices, way: str) -> str:
    """What a way down costs the other methods."""
    points = _points_of_others(choices, way)
    return signed(statistics.fmean(points.values())) if points else ""


def _for_others(choices: Choices, best: str) -> str:
    """A sentence for when the width that suits FedBAT costs other methods too much."""
    points = _points_of_others(choices, best)
    if not points or costs_little(points.values()):
        return ""
    method, place = min(points, key=points.__getitem__)
    wider = {width: _points_of_others(choices, width) for width in SNAPSHOTS[: SNAPSHOTS.index(best)]}
    comparable = {width: found for width, found in wider.items() if points.keys() <= found.keys()}
    enough = [width for width, found in comparable.items() if costs_little(found.values())]
    none = "no wider one is enough for them, either" if comparable else f"wider ones are {NOT_YET} for all of them"
    advice = f"`--down {enough[-1]}` costs them as little" if enough else none
    mean, worst = (signed(value) for value in (statistics.fmean(points.values()), points[method, place]))
    lost = f"{mean} points on average, at worst {worst} (`{method}`, {where(place)})"
    return f" Other methods lose more by `--down {best}`: {lost}; {advice}."


def _points_of_others(choices: Choices, way: str) -> dict[tuple[str, Place], float]:
    methods = dict.fromkeys(choice.method for choice in choices.listed(choices.places) if choice.method != TRIED_ON)
    compared = {method: choices.compare(Choice(method, way), Choice(method)) for method in methods}
    return {(method, place): value for method, found in compared.items() for place, value in found.points.items()}
