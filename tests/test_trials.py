"""Toy problems as an experiment: trials leave records, and records are what RESULTS.md shows of them."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbat.cli import app
from fedbat.errors import ConfigError
from fedbat.reproduce import Records, load_book
from fedbat.reproduce.claims import Claim, judge
from fedbat.reproduce.estimates import Region
from fedbat.reproduce.figures import draw_figures
from fedbat.reproduce.kinds import Shelf
from fedbat.reproduce.report import render
from fedbat.reproduce.results import Results
from fedbat.reproduce.theory.record import (
    FOLDER,
    TrialRecord,
    file_name,
    load_trial_records,
    run_trial,
    run_trials,
    write_record,
)
from fedbat.reproduce.theory.trials import PROBLEMS, Trial, read_trials

ROOT = Path(__file__).parent.parent
BOOK = load_book(ROOT / "experiments")
THEORY = BOOK.tables["theory"]
SMALL = {
    "problem": "quadratics",
    "compress": "binarization",
    "clients": 4,
    "sampled": 2,
    "dimension": 3,
    "mu": 1.0,
    "smoothness": 4.0,
    "spread": 1.0,
    "sigma": 0.5,
    "start": 0.0,
    "tau": 2,
    "first": 2,
    "steps": 1600,
    "points": 12,
    "seeds": 3,
}


def quiet(text):
    pass


def falling(rate, constant, spread=0.0):
    """A record of exact power laws."""
    trial = Trial(**SMALL)
    times = 31 + 1 + trial.tau * np.array(trial.rounds, dtype=float)
    factors = np.linspace(1 - spread, 1 + spread, trial.seeds)
    constants = {"g2": 1.0, "q2": 0.0, "heterogeneity": 0.0, "start2": 1.0, "limit": constant}
    return TrialRecord(trial, times, constant * factors * times[:, None] ** -rate, constants, {"seconds": 1.0})


# Trials.


def test_a_file_lists_what_is_varied():
    found = read_trials("here", [SMALL | {"sampled": [4, 2], "compress": ["none", "binarization"]}])
    assert [(t.sampled, t.compress) for t in found] == [
        (4, "none"),
        (2, "none"),
        (4, "binarization"),
        (2, "binarization"),
    ]
    assert len({file_name(trial) for trial in found}) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problem": "cubics"}, "problem is 'cubics', choose from quadratics, ripples"),
        ({"compress": "signs"}, "choose from binarization, none"),
        ({"sampled": 5}, "5 of 4 clients"),
        ({"first": 1}, "first is 1 with tau 2"),
        ({"seeds": 1}, "expected at least 2"),
        ({"colour": 1}, "no trial has colour"),
    ],
)
def test_mistakes_in_a_file_are_told(change, message):
    with pytest.raises(ConfigError, match=f"here: .*{message}"):
        read_trials("here", [SMALL | change])


def test_measured_times_are_ends_of_rounds_evenly_spaced_in_logarithms():
    trial = Trial(**SMALL)
    assert trial.rounds[0] == 1 and trial.rounds[-1] * trial.tau == trial.steps
    assert np.diff(np.log(trial.rounds[-6:])).std() < 0.01


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_same_trial_gives_the_same_numbers_and_another_seed_others(problem):
    trial = Trial(**SMALL | {"problem": problem, "steps": 40, "points": 3})
    first, second = run_trial(trial), run_trial(trial)
    assert np.array_equal(first.values, second.values) and first.constants == second.constants
    assert first.values.shape == (3, trial.seeds) and (first.values > 0).all()
    other = run_trial(dataclasses.replace(trial, seed=1))
    assert not np.isclose(first.values, other.values).any()


def test_figures_of_exact_power_laws():
    record = falling(1, 7.0, spread=0.1)
    assert record.slope().value == pytest.approx(-1) and record.slope().spread.std == pytest.approx(0, abs=1e-9)
    assert record.constant().value == pytest.approx(7) == record.constant(until=500).value
    assert record.constant().spread.std == pytest.approx(0.7)
    assert record.bound_constant() == pytest.approx(4 * (2 * (0.25 / 4 + 8 + 4 * 2 / 6 * 4) + 16))
    assert record.share().value == pytest.approx(7 / record.bound_constant())
    assert falling(1.5, 7.0).slope().value == pytest.approx(-1.5)


# Records.


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = run_trial(Trial(**SMALL | {"steps": 100}))
    write_record(record, tmp_path)
    (found,) = load_trial_records(tmp_path)
    assert found.trial == record.trial and found.facts == record.facts
    assert np.allclose(found.values, record.values, rtol=1e-5, atol=0) and np.array_equal(found.times, record.times)
    assert np.allclose(found.bound, record.bound, rtol=1e-4)
    parts = json.loads((tmp_path / FOLDER / file_name(record.trial)).read_text())
    assert {"identity", "versions", "git_revision", "machine", "device", "seconds", "constants"} <= parts.keys()


def test_only_what_has_no_whole_record_is_run(tmp_path):
    trials = read_trials("here", [SMALL | {"steps": 40, "sampled": [4, 2, 1]}])
    assert run_trials(trials, tmp_path, quiet, deadline=0.0) == []
    assert [record.trial for record in run_trials(trials[:2], tmp_path, quiet)] == list(trials[:2])
    assert [record.trial for record in run_trials(trials, tmp_path, quiet)] == [trials[2]]
    cut, changed = (tmp_path / FOLDER / file_name(trial) for trial in trials[:2])
    cut.write_text(cut.read_text()[:-50])
    changed.write_text(changed.read_text().replace('"tau": 2', '"tau": 1'))
    assert [record.trial for record in run_trials(trials, tmp_path, quiet)] == list(trials[:2])


def test_committed_records_are_all_trials_of_the_file():
    found = load_trial_records(ROOT / "results")
    assert {record.trial for record in found} == set(THEORY.trials)
    names = {path.name for path in (ROOT / "results" / FOLDER).iterdir()}
    assert names == {file_name(trial) for trial in THEORY.trials}
    assert all(path.stat().st_size < 20_000 for path in (ROOT / "results" / FOLDER).iterdir())


@pytest.mark.parametrize("trial", [t for t in THEORY.trials if t.problem == "ripples"], ids=file_name)
def test_a_committed_record_is_what_its_trial_gives(trial):
    """Roundings of another machine may flip bits, so means are compared by their standard errors."""
    recorded, found = Records.load(ROOT / "results").trials[trial], run_trial(trial)
    error = np.hypot(recorded.values.std(1, ddof=1), found.values.std(1, ddof=1)) / math.sqrt(trial.seeds)
    assert (abs(recorded.mean - found.mean) < 6 * error).all()


# The page, the claims and the command.


def test_the_page_shows_every_trial_and_draws_what_was_run(tmp_path):
    empty = render(BOOK, Records(()), Path("figures"))
    assert f"## {THEORY.title}" in empty and "clients heard" not in empty and "theory.png" not in empty
    assert empty.count("Not run yet: `binarization`, `none` (10 of 10, 4 of 10") == 2  # problems
    records = Records((), (run_trial(dataclasses.replace(THEORY.trials[0], steps=40, points=5)),))
    table = dataclasses.replace(THEORY, trials=tuple(records.trials))
    small = dataclasses.replace(BOOK, folder=tmp_path, tables={"theory": table})  # without claims
    page = render(small, records, Path("figures"))
    assert "(figures/theory.png)" in page
    first, second = draw_figures(small, records, tmp_path / "a"), draw_figures(small, records, tmp_path / "b")
    assert [path.name for path in first] == ["theory.png", "theory.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.parametrize(
    ("kind", "region", "record", "verdict"),
    [
        ("slope", Region(-1.1, -0.9), falling(1, 7.0), "holds"),
        ("slope", Region(-1.1, -0.9), falling(0.5, 7.0), "fails"),
        ("share-of-bound", Region(below=1), falling(1, 7.0, spread=0.1), "holds"),
        ("share-of-bound", Region(below=1), falling(1, 1e3, spread=0.1), "fails"),
        ("share-of-bound", Region(below=1), falling(1, falling(1, 1.0).bound_constant(), spread=0.1), "undecided"),
        ("slope", Region(-1.1, -0.9), None, "waiting for records"),
    ],
)
def test_claims_are_judged_by_trials(kind, region, record, verdict):
    book = dataclasses.replace(BOOK, tables={"theory": dataclasses.replace(THEORY, trials=(Trial(**SMALL),))})
    results = Results(book, Records((), (record,) if record else ()))
    claim = Claim("some-id", "4", "A claim.", kind, region=region, trials={"problem": ["quadratics"]})
    finding = judge(claim, Shelf(book), results)
    assert finding.verdict == verdict and finding.printed is None
    assert (finding.present, finding.needed) == (int(record is not None), 1)
    missing = dataclasses.replace(claim, trials={"sampled": [3]})
    with pytest.raises(ConfigError, match="claim 'some-id': no experiment file has a trial with"):
        judge(missing, Shelf(book), results)


def test_the_command_runs_trials_once_and_filters_leave_them_out(tmp_path, monkeypatch):
    folder = tmp_path / "experiments"
    folder.mkdir()
    entry = "\n".join(f"{name} = {json.dumps(value)}" for name, value in (SMALL | {"steps": 40}).items())
    (folder / "theory.toml").write_text(f'title = "Toys"\nview = "theory"\n[[trial]]\n{entry}\n')
    (folder / "order.toml").write_text('[[part]]\ntable = "theory"\nseeds = [0]\n')
    (folder / "notes.toml").write_text("")
    (folder / "protocols.toml").write_text((ROOT / "experiments" / "protocols.toml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def reproduce(*arguments):
        return CliRunner().invoke(app, ["reproduce", *arguments])

    assert reproduce("--list").output.split()[4:8] == ["theory", "1", "0", "Toys"]
    for expected in ("0 trials done before, 1 run", "1 trials done before, 0 run"):
        done = reproduce("all")
        assert done.exit_code == 0 and expected in done.output, done.output
    assert reproduce("--list").output.split()[4:8] == ["theory", "1", "1", "Toys"]
    for arguments in (["theory", "--only", "dataset=fmnist"], ["theory", "--seeds", "1"]):
        assert isinstance(error := reproduce(*arguments).exception, ConfigError) and "has no cell with" in str(error)
