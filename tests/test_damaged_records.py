"""A record counts only if it is whole, says one thing, and lies where it belongs; what is wrong with it is told."""

import json
import shutil

import pytest

from fedbat.errors import DataError
from fedbat.reproduce import Records, load_record
from fedbat.reproduce.cells import identity
from fedbat.reproduce.sweep import Settings, sweep
from tests.made_up import quiet, small_book
from tests.test_reproduce import SMALL


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    files = {"small.toml": SMALL, "order.toml": '[[part]]\ntable = "small"\nseeds = [0]\n'}
    cells = small_book(root / "experiments", files).cells("small", [0], {"method": "fedbat", "split": "iid"})
    sweep(cells, Settings(root / "results", root / "work", engine="sequential"), quiet)
    return root, cells[0]


@pytest.fixture
def cell(published, tmp_path, monkeypatch):
    """With a copy of its record below the current folder."""
    root, cell = published
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return cell


@pytest.fixture
def folder(cell, tmp_path):
    return tmp_path / "results" / cell.folder


def without(name):
    return lambda found: {key: value for key, value in found.items() if key != name}


def but(**change):
    return lambda found: found | change


def same(found):
    return found


def worded(line):
    return line | {"layers": {"relative_error": ["low" for _ in line["layers"]["relative_error"]]}}


def sealed(summary):
    """With the hash of what it says was run."""
    return summary | {"identity": identity(summary["config"] | {"settings": summary["method_settings"]})}


DAMAGES = {  # to the summary, to the second line, and what is said of it
    "unfinished": (but(status="running"), same, "its status is 'running', expected 'finished'"),
    "no status": (without("status"), same, "has no status, expected text"),
    "no best accuracy": (without("best_accuracy"), same, "its best_accuracy is None, expected 0."),
    "another best accuracy": (but(best_accuracy=0.99), same, "its best_accuracy is 0.99, expected"),
    "another last ten": (but(last10_accuracy=0.99), same, "its last10_accuracy is 0.99, expected"),
    "other bytes": (but(uplink_bytes_per_client_round=7.0), same, "its uplink_bytes_per_client_round is 7.0"),
    "a larger model": (but(num_parameters=10**6), same, "its bits_per_parameter is"),
    "no model": (without("num_parameters"), same, "cannot be summed up (KeyError('num_parameters'))"),
    "other seconds": (but(seconds=1e6), same, "its seconds is 1000000.0, expected"),
    "no seconds": (without("seconds"), same, "its seconds is None, expected"),
    "no machine": (without("machine"), same, "has no machine, expected an object"),
    "another engine": (but(engine=7), same, "has engine 7, expected an object or null"),
    "odd own code": (but(own="mine"), same, "has own 'mine', expected an object"),
    "odd own code later on": (but(resumed=[{"own": 3}]), same, "has own 3, expected an object"),
    "no hash of what was run": (without("identity"), same, "not those that were published"),
    "no hash of its rounds": (without("rounds_sha256"), same, "not those that were published"),
    "nobody's own code": (without("own"), same, "has no own, expected an object"),
    "another seed": (but(seed=1), same, "its seed is 1, expected 0"),
    "an unknown method": (but(config={"method": "new"}), same, "a configuration this version cannot run"),
    "settings of words": (
        but(method_settings={"rho": "many"}),
        same,
        "a configuration this version cannot run (rho='many'",
    ),
    "odd settings": (but(method_settings=[]), same, "has method_settings [], expected an object"),
    "a line without accuracy": (same, without("accuracy"), "line 2 has no accuracy, expected a number"),
    "a line with a word": (same, but(accuracy="good"), "line 2 has accuracy 'good', expected a number"),
    "a line that is a number": (same, lambda line: 5, "line 2 has 5, expected an object"),
    "no clients": (same, but(clients=[], lost={"1": "", "2": "", "3": "", "4": ""}), "cannot be summed up (ZeroDiv"),
    "a layer less": (same, but(layers={"relative_error": []}), "has errors of 0 layers, expected the"),
    "a layer of words": (same, worded, "line 2 has relative_error 'low', expected a number or null"),
    "the round before": (same, but(round=1), "it has 3 rounds, expected 1 to 3"),
    "another accuracy": (same, but(accuracy=1e-4), "not those that were published"),
    "another loss": (same, but(loss=1e-4), "not those that were published"),
}


def damaged(folder, to_summary=same, to_line=same):
    """Gives the summary as it was; what is left the same stays so to the byte."""
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(to_summary(summary)))
    first, second, third = (folder / "rounds.jsonl").read_text().splitlines()
    changed = json.dumps(to_line(json.loads(second)), separators=(",", ":"))
    (folder / "rounds.jsonl").write_text("\n".join([first, changed, third, ""]))
    return summary


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_does_not_count_and_the_list_says_why(cell, folder, damage, fedbat_here):
    *changes, said = DAMAGES[damage]
    damaged(folder, *changes)
    assert Records.load(folder).get(cell.identity) is None
    for name, start in ((["small"], f"{cell.folder}: not run yet; "), ([], "left out: ")):
        listed = fedbat_here("reproduce", *name, "--list", check=0).stdout.splitlines()
        (line,) = [line for line in listed if said in line]
        assert line.startswith(f"{start}results/{cell.folder}") and line.endswith(("run it again", "remove it"))
    fedbat_here("reproduce", "--claims", check=0)


def test_a_page_that_leaves_a_record_out_says_so(cell, folder, fedbat_here):
    damaged(folder, but(best_accuracy=0.99))
    written = fedbat_here("reproduce", "--write", check=0).stdout
    assert f"left out: results/{cell.folder} " in written and "0 records in RESULTS.md" in written


@pytest.mark.parametrize("damage", ["no status", "no machine", "a line without accuracy", "a line that is a number"])
def test_a_record_that_was_named_and_cannot_be_read_is_told(folder, damage, fedbat_here):
    *changes, said = DAMAGES[damage]
    damaged(folder, *changes)
    with pytest.raises(DataError, match=said):
        load_record(folder)
    done = fedbat_here("report", folder, check=2)
    assert said in done.stdout and "none of the runs" in done.stderr


def test_a_record_as_it_was_published_counts(cell, folder):
    summary = damaged(folder)
    assert Records.load(folder).get(cell.identity) and summary["identity"] == cell.identity


@pytest.mark.parametrize("change", [{"seed": 1}, {"rho": 4.0}])
def test_a_record_counts_for_no_other_cell_than_that_of_its_folder(cell, folder, change):
    """Even if its hash is that of what it says."""

    def changed(summary):
        if "rho" in change:
            return sealed(summary | {"method_settings": summary["method_settings"] | change})
        return sealed(summary | change | {"config": summary["config"] | change})

    damaged(folder, sealed)
    assert Records.load(folder).get(cell.identity)
    damaged(folder, changed)
    records = Records.load(folder)
    assert len(records) == 0 and "its configuration is that of fmnist-mini/iid-n12/" in str(records.faults)


def test_a_record_outlives_fields_that_experiments_did_not_have_yet(cell, folder):
    """What is hashed is what was written down."""

    def older(summary):
        return sealed(summary | {"config": without("samples")(without("partition_seed")(summary["config"]))})

    damaged(folder, older)
    assert Records.load(folder).get(cell.identity)
    assert json.loads((folder / "summary.json").read_text())["identity"] != cell.identity
