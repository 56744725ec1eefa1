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


def padded(cells: Sequence[str], header: Sequence[str]) -> list[str]:
    """A row padded with empty cells, for what has not been run."""
    return [*cells, *[""] * (len(header) - len(cells))]
