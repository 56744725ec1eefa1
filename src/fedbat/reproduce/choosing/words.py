"""How choices, places and their measurements are written."""

import statistics
import textwrap
from collections.abc import Sequence

from fedbat.downlink import FOLLOW
from fedbat.reproduce.choosing.choices import Choice, Place
from fedbat.reproduce.results import Result

NOT_YET = "not measured yet"


def where(place: Place) -> str:
    """A place, for a column's header or in parentheses."""
    return f"{place.dataset} {place.split}"


def coverage(tried: Sequence[Place], planned: Sequence[Place]) -> str:
    """How many of the planned splits were tried."""
    if len(tried) == len(planned):
        return f"measured on all {len(planned)} splits"
    return f"so far measured on {len(tried)} of {len(planned)} splits ({', '.join(map(where, tried))})"


def plural(bits: str) -> str:
    """A number of bits, or several: 2 and 4 bits."""
    return f"{bits} bit" if bits == "1" else f"{bits} bits"


def travels(choice: Choice, results: Sequence[Result]) -> list[str]:
    """Method, bits up and bits down; those up as packed."""
    return [f"`{choice.method}`", bits_up(results), "1, follow" if choice.down == FOLLOW else choice.down]


def bits_up(results: Sequence[Result]) -> str:
    """Bits up for each weight that is compressed."""
    return f"{mean(results, 'bits_per_compressed_parameter'):.3g}"


def mean(results: Sequence[Result], figure: str) -> float:
    """The mean of a figure of the summaries, over places."""
    return statistics.fmean(result.mean(figure) for result in results)


def num_bytes(results: Sequence[Result], way: str) -> float:
    """The bytes that go up or down per client and round."""
    return mean(results, f"{way}link_bytes_per_client_round")


def kilobytes(value: float) -> str:
    """A number of bytes in kB, without the unit, for columns."""
    return f"{value / 1e3:,.0f}"


def signed(points: float) -> str:
    """A difference with its sign; zero is never negative."""
    return f"{round(points, 2) + 0.0:+.2f}"


def accuracies(result: Result | None) -> str:
    """Accuracies: best round / last ten / last ten of the averaged model."""
    if result is None:
        return ""
    found = [result.best, result.last10, result.averaged]
    return "/".join("–" if one is None else f"{one.mean:.1f}" for one in found)


def several(choices: Sequence[Choice]) -> str:
    """Some choices in words, by method."""
    by: dict[str, list[str]] = {}
    for choice in choices:
        by.setdefault(choice.method, []).append(choice.down)
    return ", ".join(f"`{method}` (down {', '.join(downs)})" for method, downs in by.items())


def paragraph(text: str, item: str = "") -> str:
    """Text in lines for a page; a list item begins with its mark."""
    return textwrap.fill(text, 120, initial_indent=item, subsequent_indent=" " * len(item), break_on_hyphens=False)
