"""Pieces of RESULTS.md."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from fedbat.reproduce.results import MeanStd
from fedbat.reproduce.tables import Number


def table(header: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str] = ()) -> Iterator[str]:
    """Lines of a table; columns named in `words` are set left, figures right."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'|'.join('---' if name in words else '---:' for name in header)}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def mean_std(found: MeanStd | None) -> str:
    """A mean with its standard deviation; nothing for nothing."""
    if found is None:
        return ""
    return f"{found.mean:.2f}" + ("" if found.std is None else f" ± {found.std:.2f}")


def number(printed: Number | None) -> str:
    """As the paper prints it."""
    if printed is None:
        return ""
    return f"{printed.accuracy:.1f}" + ("" if printed.std is None else f" ± {printed.std:.1f}")


def share(part: int, whole: int) -> str:
    """How many of how many."""
    return f"{part} of {whole}"


def padded(cells: Sequence[str], header: Sequence[str]) -> list[str]:
    """A row of which the rest has not been run."""
    return [*cells, *[""] * (len(header) - len(cells))]
