"""Committed records are whole and in their place, and RESULTS.md is what they say."""

import json
import re
from pathlib import Path

import pytest

from fedbat.experiment import Experiment
from fedbat.plots import digest
from fedbat.reproduce import Cell, Records, load_book, load_record
from fedbat.reproduce.evidence import render_evidence
from fedbat.reproduce.figures import FORMATS, pictures
from fedbat.reproduce.report import render
from fedbat.reproduce.results import Results

ROOT = Path(__file__).parent.parent
RECORDS = sorted(path.parent for path in (ROOT / "results").rglob("summary.json"))


@pytest.mark.parametrize("folder", RECORDS, ids=lambda path: "-".join(path.parts[-3:]))
def test_a_record_is_whole_small_and_what_its_rounds_say(folder):
    record = load_record(folder)
    assert record.faults() == []
    summary, lines = record.summary, record.lines
    assert summary["best_accuracy"] == max(record.accuracy) and summary["final_accuracy"] == record.accuracy[-1]
    assert summary["last10_accuracy"] == pytest.approx(sum(record.accuracy[-10:]) / 10)
    uploads = sum(len(line["clients"]) - len(line.get("lost", ())) for line in lines)
    assert summary["uplink_bytes_per_client_round"] == pytest.approx(sum(record.uplink_bytes) / uploads)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 160_000
    assert {path.name for path in folder.iterdir()} == {"summary.json", "rounds.jsonl"}


@pytest.mark.parametrize("folder", RECORDS, ids=lambda path: "-".join(path.parts[-3:]))
def test_a_record_lies_where_its_cell_looks_for_it(folder):
    cell = Cell(Experiment(**json.loads((folder / "summary.json").read_text())["config"]).resolved())
    assert ROOT / "results" / cell.folder == folder
    assert load_record(folder).identity == cell.identity


def test_results_page_is_what_the_records_say():
    book, records = load_book(ROOT / "experiments"), Records.load(ROOT / "results")
    assert (ROOT / "RESULTS.md").read_text() == render(book, records, Path("results/figures")), "run `make results`"
    evidence = (ROOT / "results" / "CLAIMS.md").read_text()
    assert evidence == render_evidence(book, records, "../RESULTS.md"), "run `make results`"


def test_pictures_show_what_the_records_say():
    """All are there, none is left over, and each carries the hash of what it is to show."""
    book = load_book(ROOT / "experiments")
    results = Results(book, Records.load(ROOT / "results"))
    shown = {found.name: digest(found.panels) for table in book.tables.values() for found in pictures(table, results)}
    files = list((ROOT / "results" / "figures").iterdir())
    assert {path.name for path in files} == {f"{name}.{ending}" for name in shown for ending in FORMATS}
    told = {path.stem: path.read_text() for path in files if path.suffix == ".svg"}
    assert [name for name, text in told.items() if shown[name] not in text] == [], "run `make results`"


def test_notes_are_words():
    """Figures come from records; a name such as Non-IID-2 is none."""
    book = load_book(ROOT / "experiments")
    for text in [*(note.text for note in book.notes), *book.data.values()]:
        assert not re.search(r"\d\.\d|\d\s*(%|point|percent)", text), text


def test_git_leaves_records_as_they_are():
    """They hold hashes of their files, which other line ends would change."""
    assert "results/** -text" in (ROOT / ".gitattributes").read_text().splitlines()
