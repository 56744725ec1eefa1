"""Every choice with what it reaches and sends, and the seconds that sending takes on a link."""

import statistics
from collections.abc import Iterator, Sequence

from fedbat.downlink import FOLLOW, FULL
from fedbat.link import Rate, transfer_seconds
from fedbat.reproduce.choosing.choices import Choice, Choices, Place
from fedbat.reproduce.choosing.down import ANY, recommended_width
from fedbat.reproduce.choosing.words import NOT_YET, accuracies, kilobytes, num_bytes, paragraph, several, travels
from fedbat.reproduce.markdown import table
from fedbat.reproduce.results import Result

LINKS = (Rate(up=1, down=10), Rate(up=10, down=50), Rate(up=100, down=100))  # Mbit/s


def every_choice(choices: Choices) -> Iterator[str]:
    """A table for each data set; planned choices without a record are named below it."""
    for (dataset, clients), places in choices.datasets().items():
        rows = []
        for choice in choices.listed(places):
            results = choices.of(choice, places)
            reached = [accuracies(choices.found[place].get(choice)) for place in places]
            rows.append([*travels(choice, results), *reached, *_traffic(results)])
        splits = [place.split for place in places]
        yield from [f"### {dataset}, {clients} clients", ""]
        if rows:
            yield from [_about(choices, places), ""]
            header = ("method", "bits up", "bits down", *splits, "kB up", "down", "both", "less")
            yield from table(header, rows, ("method", *splits))
        planned = dict.fromkeys(choice for place in places for choice in choices.planned[place])
        if left := [choice for choice in planned if not choices.of(choice, places)]:
            yield from [paragraph(f"{NOT_YET.capitalize()}: {several(left)}."), ""]


def transfer(choices: Choices) -> Iterator[str]:
    """A table of the seconds that one client's round spends on links."""
    shown = [Choice("fedavg"), *(Choice("fedbat", down) for down in (FULL, recommended_width(choices) or ANY, FOLLOW))]
    rows = []
    for places in choices.datasets().values():
        for choice in shown:
            if results := choices.of(choice, places):
                model = str(results[0].records[0].configuration["model"])
                rows.append([model, *travels(choice, results), *(_seconds(results, rate) for rate in LINKS)])
    words = ("model", "method")
    header = (*words, "bits up", "bits down", *(f"{rate.up:g} up, {rate.down:g} down" for rate in LINKS))
    yield from table(header, rows, words) if rows else [f"{NOT_YET.capitalize()}."]


def _about(choices: Choices, places: Sequence[Place]) -> str:
    found = [result for place in places for result in choices.found[place].values()]
    configuration = found[0].records[0].configuration
    counts = [len(result.records) for result in found]
    fewest, most = min(counts), max(counts)
    seeds = f"{fewest} to {most} seeds" if fewest < most else "one seed" if most == 1 else f"{most} seeds"
    per_round = f"{configuration['per_round']} of {configuration['clients']} clients a round"
    return f"Model `{configuration['model']}`, {per_round}, {configuration['rounds']} rounds, {seeds}."


def _traffic(results: Sequence[Result]) -> list[str]:
    """Kilobytes up, down and both, and how many times less that is than float32 both ways."""
    sizes = [num_bytes(results, "up"), num_bytes(results, "down"), statistics.fmean(r.traffic for r in results)]
    return [*map(kilobytes, sizes), f"{statistics.fmean(result.saving for result in results):.1f}x"]


def _seconds(results: Sequence[Result], rate: Rate) -> str:
    up, down = (num_bytes(results, way) for way in ("up", "down"))
    seconds = transfer_seconds(up, rate.up) + transfer_seconds(down, rate.down)
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:,.0f}"
