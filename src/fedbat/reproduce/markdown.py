"""Building blocks of RESULTS.md."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from fedbat.reproduce.results import MeanStd
from fedbat.reproduce.tables import Number


def table(header: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str] = ()) -> Iterator[str]:
    """Lines of a table; columns named in `words` are aligned left, the others, of figures, right."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'|'.join('---' if name in words else '---:' for name in header)}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def not_run(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A line that names the rows that a table lacks, by name and place; names that lack the same places together."""
    places: dict[str, list[str]] = {}
    for name, place in rows:
        places.setdefault(name, []).append(place)
    names: dict[str, list[str]] = {}
    for name, found in places.items():
        names.setdefault(f"({', '.join(found)})", []).append(f"`{name}`")
    left = [f"{', '.join(found)} {where}" for where, found in names.items()]
    if left:
        yield from [f"Not run yet: {'; '.join(left)}.", ""]


def anchor(title: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return "#" + title.lower().replace(" ", "-")


def mean_std(found: MeanStd | None) -> str:
    """A mean with its standard deviation; empty for None."""
    if found is None:
        return ""
    return f"{found.mean:.2f}" + ("" if found.std is None else f" ± {found.std:.2f}")


def number(printed: Number | None) -> str:
    """A number as the paper prints it; empty for None."""
    if printed is None:
        return ""
    return f"{printed.accuracy:.1f}" + ("" if printed.std is None else f" ± {printed.std:.1f}")


def share(part: int, whole: int) -> str:
    """How many of how many: 3 of 5."""
    return f"{part} of {whole}"


def span(values: Collection[int]) -> str:
    """From the lowest to the highest: 2 to 7, or 2 if all are equal."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
