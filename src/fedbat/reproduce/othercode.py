"""Records made by other code of the user's own than is there now: they count, as nobody but the user can tell."""

from collections.abc import Iterable
from pathlib import Path

from fedbat.provenance import own_digest
from fedbat.reproduce.record import Record
from fedbat.units import count


def other_code(record: Record) -> list[str]:
    """The modules of the user's own that were not, when some of its rounds were run, what they are now.

    Nothing is said of records that do not tell, and of modules that are gone.
    """
    legs = [record.summary, *record.summary["resumed"]]
    made_by = {(module, digest) for leg in legs for module, digest in leg["own"].items()}
    return sorted({module for module, digest in made_by if own_digest(module) not in (None, digest)})


def told(records: Iterable[Record], results: Path) -> str | None:
    """A sentence about those among these records, and how to run their cells again; None if there are none."""
    found = {record.folder: modules for record in records if (modules := other_code(record))}
    if not found:
        return None
    changed = ", ".join(sorted({module for modules in found.values() for module in modules}))
    return (
        f"made by other code of {changed} than is there now: {count(len(found), 'record')}, marked by --list; "
        f"to run a cell again, remove its folder from {results}"
    )
