"""How many bits up, and with which method, depending on how skewed labels are."""

import statistics
from collections.abc import Iterator

from fedbat.downlink import FULL
from fedbat.reproduce.choosing.choices import Choice, Choices, fewest_bits
from fedbat.reproduce.choosing.words import NOT_YET, bits_up, paragraph, plural, signed, where
from fedbat.reproduce.markdown import table

BASE, OURS = Choice("fedavg"), Choice("fedbat")
BITS = {"4": Choice("fedbat bits=4"), "2": Choice("fedbat bits=2"), "1": OURS}


def uplink(choices: Choices) -> Iterator[str]:
    """A line for each split, then what every method loses against FedAvg, always with 32 bits down."""
    for split in choices.splits():
        yield paragraph(f"{split}: {_fewest(choices, split)}", "- ")
    yield ""
    methods = [choice for choice in choices.listed(choices.places) if choice.down == FULL and choice != BASE]
    rows = []
    for choice in methods:
        if points := choices.compare(choice, BASE).points:
            shown = [signed(points[place]) if place in points else "" for place in choices.places]
            rows.append([f"`{choice.method}`", bits_up(choices.of(choice, choices.places)), *shown])
    if rows:
        yield from table(("method", "bits up", *map(where, choices.places)), rows, ("method",))
        yield from _one_bit(choices, methods)


def swings(choices: Choices) -> Iterator[str]:
    """A table of how far the best round is above the last ten, and the averaged model above the model."""
    rows = []
    for split in choices.splits():
        results = choices.of_split(split)
        if results:
            swing = statistics.fmean(result.best.mean - result.last10.mean for result in results)
            gains = [mean for result in results if (mean := result.averaging_gain) is not None]
            gain = f"{signed(statistics.fmean(gains))} ({len(gains)})" if gains else NOT_YET
            rows.append([split, f"{signed(swing)} ({len(results)})", gain])
    header = ("split", "best round", "averaged model")
    yield from table(header, rows, ("split",)) if rows else [f"{NOT_YET.capitalize()}."]


def _fewest(choices: Choices, split: str) -> str:
    """How many bits FedBAT needs on a split."""
    tried = {bits: choices.compare(choice, BASE, split) for bits, choice in BITS.items()}
    measured = {bits: found for bits, found in tried.items() if found.points}
    left = [bits for bits in reversed(tried) if bits not in measured]
    waiting = f"; {plural(' and '.join(left))} {NOT_YET}" if left else ""
    if not measured:
        return f"{NOT_YET}."
    told = ", ".join(f"{signed(found.mean)} with {plural(bits)}" for bits, found in reversed(measured.items()))
    datasets = " and ".join(dict.fromkeys(place.dataset for found in measured.values() for place in found.points))
    bits = fewest_bits(measured)
    too_few = f"{plural(*measured)} loses too much" if len(measured) == 1 else "no number of bits tried is close enough"
    advice = f"**{plural(bits)} up**" if bits else f"**{too_few}**"
    return f"{advice}. FedBAT against FedAvg on {datasets}: {told}{waiting}."


def _one_bit(choices: Choices, methods: list[Choice]) -> Iterator[str]:
    """A sentence that ranks the one-bit methods."""
    ours = choices.compare(OURS, BASE).points.keys()
    means = {}
    for choice in methods:
        found = choices.compare(choice, BASE)
        if ours and found.points.keys() >= ours and bits_up(choices.of(choice, choices.places)) == "1":
            means[choice.method] = statistics.fmean(found.points[place] for place in ours)
    if len(means) > 1:
        ranked = sorted(means.items(), key=lambda item: -item[1])
        told = ", ".join(f"`{method}` {signed(mean)}" for method, mean in ranked)
        yield paragraph(f"One-bit methods that were run wherever FedBAT was, by their mean over these splits: {told}.")
