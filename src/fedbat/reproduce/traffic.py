"""What methods reach against what they send, up and down: a section of RESULTS.md."""

from collections.abc import Iterator

from fedbat.reproduce import markdown
from fedbat.reproduce.choosing.choices import has_choices
from fedbat.reproduce.results import Result, Results
from fedbat.reproduce.tables import Book, Row, Table

_WORDS = ("split", "method", "bits down")
_COLUMNS = (
    *_WORDS,
    "n",
    "best",
    "last ten",
    "received",
    "averaged, best",
    "averaged, last ten",
    "bytes up",
    "bytes down",
    "both",
    "saving",
)


def section(table: Table, book: Book, results: Results) -> Iterator[str]:
    """A table for each data set."""
    which = "\n[Which to choose](docs/choosing.md)." if has_choices(book) else ""
    yield from [
        "The model goes down with 32 bits a weight, in a few bits, or as one-bit changes that clients follow",
        "(`--down`); the server keeps the true one. *best* and *last ten* are the true model's, *received* what",
        "clients get of it (last ten rounds; empty where that is the same), *averaged* an average over the rounds",
        "that the server keeps (`--average`), for which nothing is sent. Bytes are those of a client in a round, as",
        "packed, first downloads and catching up included; *saving* is against float32 both ways. Runs from",
        f"other tables without an averaged model are included; *averaged* is over the seeds that kept one.{which}",
        "The pictures are drawn once some method has several ways down. They show the seeds that all spots of a panel",
        "share, and of them the last ten rounds: of the averaged model, which chance moves least, or of the model",
        "itself if one of the runs kept no average.",
        "",
    ]
    for (dataset, clients), rows in results.groups(table):
        yield from [f"### {dataset}, {clients} clients: traffic", ""]
        found = [(row, results.training(row)) for row in rows]
        yield from markdown.table(_COLUMNS, [_row(row, result) for row, result in found if result], _WORDS)
        yield from markdown.not_run((row.spelled(), row.point["split"]) for row, result in found if not result)


def _row(row: Row, result: Result) -> list[str]:
    return [
        row.point["split"],
        f"`{row.spelled('down')}`",
        row.point["down"],
        str(len(result.records)),
        markdown.mean_std(result.best),
        markdown.mean_std(result.last10),
        markdown.mean_std(result.last10_of("received")),
        markdown.mean_std(result.accuracy("averaged_best_accuracy")),
        markdown.mean_std(result.averaged),
        *(f"{result.mean(f'{way}link_bytes_per_client_round'):,.0f}" for way in ("up", "down")),
        f"{result.traffic:,.0f}",
        f"{result.saving:.1f} x",
    ]
