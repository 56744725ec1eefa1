"""What deviates from the paper and is still to be looked into: a section of RESULTS.md, and the notes on the rest."""

from collections.abc import Iterator
from typing import NamedTuple

from fedbat.reproduce.markdown import mean_std, number, table
from fedbat.reproduce.results import WITHIN, Result, Results
from fedbat.reproduce.sides import Side, sides
from fedbat.reproduce.tables import Book, matches

TITLE = "To be looked into"
_WORDS = ("data set", "clients", "split", "method")


class Questions(NamedTuple):
    """Deviations that no note explains."""

    cells: list[Result]
    methods: list[Side]  # that lie on one side of the paper

    @classmethod
    def of(cls, book: Book, results: Results) -> "Questions":
        """Those of all results; a method is explained if every cell of it is."""

        def explained(result: Result) -> bool:
            return any(matches(result.row.point, note.only) for note in book.notes if not note.open)

        return cls(
            [result for result in results.deviating() if not explained(result)],
            [s for s in sides(results.columns()) if s.one_sided and not all(map(explained, s.results))],
        )


def section(questions: Questions, files: str) -> Iterator[str]:
    """The cells, and the methods of which cells differ little but all in one direction."""
    yield from [
        f"## {TITLE}",
        "",
        f"Cells that differ from the paper by more than {WITHIN:g} point and by more than twice its printed standard",
        f"deviation, and methods on one side of it, for which `{files}/notes.toml` has no explanation yet.",
        "",
    ]
    rows = [
        [
            *(result.row.point[key] for key in ("dataset", "clients", "split")),
            f"`{result.row.spelled()}`",
            number(result.row.paper),
            mean_std(result.best),
            str(len(result.records)),
            f"{result.difference:+.2f}",
        ]
        for result in questions.cells
    ]
    header = (*_WORDS, "paper", "ours", "n", "difference")
    yield from table(header, rows, _WORDS) if rows else ["No cell.", ""]
    for side in questions.methods:
        yield from [
            f"- `{side.method}` is above the paper in {side.above} columns and below it in {side.below}, by "
            f"{side.mean:+.2f} points on average (sign test: p = {side.chance:.2g})."
        ]
    yield from [""] if questions.methods else []


def notes(book: Book, results: Results) -> Iterator[str]:
    """What is known of cells that have been run, and of their data."""
    points = [result.row.point for result in results.found.values()]
    about = [note for note in book.notes if any(matches(point, note.only) for point in points)]
    if about or book.data:
        yield from ["## Notes", ""]
        yield from (f"- *{', '.join(','.join(note.only.values()).split(','))}*: {note.text}" for note in about)
        yield from (f"- The data set *{name}* here is {words}." for name, words in book.data.items())
        yield ""
