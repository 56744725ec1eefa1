"""Which method, how many bits: what is recommended follows from the records, and the pages say so."""

import itertools
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedbat.cli import app
from fedbat.downlink import FOLLOW, FULL
from fedbat.errors import ConfigError
from fedbat.reproduce import Records, load_book
from fedbat.reproduce.blocks import block_names, fill
from fedbat.reproduce.choosing.choices import NOWHERE, TOLERANCE, Choice, Choices, Compared, Place, fewest_bits
from fedbat.reproduce.choosing.down import SNAPSHOTS, recommended_width
from fedbat.reproduce.choosing.page import BLOCKS, blocks
from fedbat.reproduce.choosing.up import BITS
from fedbat.reproduce.results import Results
from tests.made_up import EXPERIMENTS, WHOLE, made_up, without_average

ROOT = Path(__file__).parent.parent
BOOK = load_book(EXPERIMENTS)
TRAFFIC = BOOK.tables["traffic"].rows
PLACES = Choices(BOOK, Results(BOOK, Records(()))).places
PAGES = {path: path.read_text() for path in (ROOT / "docs").glob("*.md") if block_names(path.read_text())}


def runs(cost, rows=TRAFFIC, seed=0):
    """A record of each row: ninety percent less what it costs; None leaves it out."""
    found = ((row, cost(row.point)) for row in rows)
    return [made_up(row, 90 - points, seed) for row, points in found if points is not None]


def choices(*records):
    return Choices(BOOK, Results(BOOK, Records(tuple(records))))


def by_width(**costs):
    """FedBAT with snapshots that cost so much; a width that is not named was not run."""
    known = {FULL: 0.0, **{name.removeprefix("w"): cost for name, cost in costs.items()}}
    return runs(lambda point: known.get(point["down"]) if point["method"] == "fedbat" else None)


# The pages.


def test_the_pages_say_what_the_records_say():
    made = blocks(BOOK, Records.load(ROOT / "results"), ROOT / "results")
    for path, text in PAGES.items():
        assert text == fill(text, made), f"{path.name}: run `make results`"
    assert {name for text in PAGES.values() for name in block_names(text)} == made.keys()
    assert {path.name for path in PAGES} == {"choosing.md", "downlink.md"}


def test_only_what_lies_between_the_markers_is_written():
    page = "a\n<!-- from the records: one -->\nold\n<!-- end -->\nb\n<!-- from the records: two -->\n<!-- end -->\n"
    filled = fill(page, {"one": "1\n", "two": "2", "three": "3"})
    assert filled.split() == page.replace("old", "1").replace("two -->", "two --> 2").split()
    assert fill(filled, {"one": "1", "two": "2"}) == filled
    with pytest.raises(ConfigError, match="a page asks for two; the records make one"):
        fill(page, {"one": ""})


def test_without_records_nothing_is_recommended_and_everything_is_said_to_be_missing(tmp_path):
    made = blocks(BOOK, Records(()), tmp_path)
    assert all("not measured yet" in text.lower() for name, text in made.items() if name != "flower")
    assert not any(re.search(r"[-+]\d\.\d|\| \d", text) for text in made.values())  # no figure
    (row,) = (row for row in TRAFFIC if row.point["method"] == "fedmrn" and row.point["split"] == "non-iid-1"
              and row.point["down"] == "2")  # fmt: skip
    assert not any("nan" in text for text in blocks(BOOK, Records((made_up(row, 90),)), tmp_path).values())


@pytest.mark.parametrize(
    ("protocol", "experiments", "results", "filled"),
    [
        ("authors", "experiments", "results", True),
        ("text", "experiments", "results", False),
        ("authors", "grids", "results", False),
        ("authors", "experiments", "my-results", False),
    ],
)
def test_the_command_fills_the_pages_beside_the_repositorys_records(tmp_path, protocol, experiments, results, filled):
    page, plain = tmp_path / "docs" / "page.md", tmp_path / "docs" / "plain.md"
    page.parent.mkdir()
    page.write_text("<!-- from the records: width -->\n<!-- end -->\n")
    plain.write_text("words")
    # Claims point at the repository's tests.
    shutil.copytree(EXPERIMENTS, tmp_path / experiments, ignore=shutil.ignore_patterns("claims.toml"))
    folders = ["--experiments", str(tmp_path / experiments), "--results", str(tmp_path / results)]
    done = CliRunner().invoke(app, ["reproduce", "--write", "--protocol", protocol, *folders])
    assert done.exit_code == 0, done.output
    assert ("not measured yet" in page.read_text()) == filled and plain.read_text() == "words"
    beside = (experiments, results) == ("experiments", "results")
    page = tmp_path / ("" if beside else results) / f"RESULTS{'-text' if protocol == 'text' else ''}.md"
    assert page.is_file() and f"from the records in `{results}/`" in page.read_text()


# The width.


@pytest.mark.parametrize(
    ("costs", "width"),
    [
        ({"w8": 0.0, "w4": 0.1, "w3": 0.4, "w2": 0.6}, "3"),
        ({"w8": 0.0, "w4": -0.3, "w3": 0.4, "w2": 0.5}, "2"),  # the tolerance itself is within
        ({"w8": 0.1, "w4": 0.6, "w3": 0.2, "w2": 0.2}, "8"),  # what follows one that fails is luck
        ({"w8": 0.7, "w4": 0.8}, None),
        ({"w4": 0.3}, "4"),
        ({}, None),
    ],
)
def test_the_narrowest_width_that_costs_little_is_recommended(costs, width):
    found = choices(*by_width(**costs))
    assert recommended_width(found) == width
    text = "\n".join(BLOCKS["width"](found))
    assert (f"**Recommended: `--down {width}`**" in text) == (width is not None)
    shown = width or "3"
    assert f"fedbat run --down {shown} " in "\n".join(BLOCKS["commands"](found))
    assert f'down="{shown}"' in "\n".join(BLOCKS["flower"](found))


def test_one_split_on_which_it_costs_too_much_is_enough():
    bad = PLACES[3]

    def cost(point):
        hurt = point["down"] == "4" and Place(*(point[key] for key in Place._fields)) == bad
        return (NOWHERE + 0.1 if hurt else 0.0) if point["method"] == "fedbat" and point["down"] in "3284" else None

    found = choices(*runs(cost))
    assert found.compare(Choice("fedbat", "4"), Choice("fedbat")).mean > -TOLERANCE
    assert recommended_width(found) == "8"
    assert "-1.10 (cifar10 iid)" in "\n".join(BLOCKS["widths"](found))


def test_a_width_counts_once_it_was_tried_wherever_another_was():
    records = by_width(w8=0.0, w4=0.0)
    one_more = [record for record in by_width(w2=0.0) if record.summary["config"]["down"] == "2"]
    assert recommended_width(choices(*records, *one_more[:-1])) == "4"
    assert recommended_width(choices(*records, *one_more)) == "2"


@pytest.mark.parametrize("split", sorted({place.split for place in PLACES}))
def test_nothing_is_recommended_before_every_kind_of_split_was_tried(split):
    labels = {"iid": "iid", "non-iid-1": "dirichlet", "non-iid-2": "labels-balanced"}[split]
    others = [record for record in by_width(w4=0.0) if record.summary["config"]["partition"] != labels]
    found = choices(*others)
    assert recommended_width(found) is None
    text = " ".join("\n".join(BLOCKS["width"](found)).split())
    assert "not settled" in text and text.endswith(f"and on none that is {split}.")
    assert "fedbat run --down 3 " in "\n".join(BLOCKS["commands"](found))


@pytest.mark.parametrize(
    ("costs", "told"),
    [
        ({"2": 0.4}, None),
        ({"2": 0.8}, "-0.80 points on average, at worst -0.80 (`fedavg`, fmnist iid); wider ones are not measured yet"),
        ({"2": 0.8, "3": 0.6}, "no wider one is enough for them, either."),
        ({"2": 0.8, "3": 0.1}, "`--down 3` costs them as little."),
    ],
)
def test_a_width_that_other_methods_lose_too_much_by_is_said_to_be_fedbats(costs, told):
    def cost(point):
        known = {FULL: 0.0, **({"2": 0.1} if point["method"] == "fedbat" else costs)}
        return known.get(point["down"]) if point["method"] in ("fedavg", "fedbat") else None

    records = runs(cost)
    text = " ".join("\n".join(BLOCKS["width"](choices(*records))).split())
    assert text.startswith("**Recommended: `--down 2`**")
    assert "Other methods lose more by `--down 2`" not in text if told is None else told in text
    if "3" in costs:  # measured only in part, it may be enough for the easy places alone
        config = next(r.summary["config"] for r in records if r.summary["config"]["down"] == "3")
        text = " ".join(
            "\n".join(BLOCKS["width"](choices(*(r for r in records if r.summary["config"] != config)))).split()
        )
        assert text.endswith("wider ones are not measured yet for all of them.")


def test_how_much_it_rests_on_is_told():
    some = [record for record in by_width(w4=0.2) if record.summary["config"]["dataset"] == "fmnist"]
    text = " ".join("\n".join(BLOCKS["width"](choices(*some))).split())
    assert "-0.20 points on average" in text and "so far measured on 3 of 6 splits (fmnist iid, " in text
    text = " ".join("\n".join(BLOCKS["width"](choices(*by_width(w4=0.2)))).split())
    assert "measured on all 6 splits" in text


points = st.dictionaries(st.sampled_from(PLACES), st.floats(-2, 1))


@given(st.dictionaries(st.sampled_from(SNAPSHOTS), points.map(Compared)))
def test_the_fewest_bits_by_a_slow_search(tried):
    """All that were tried everywhere, tried again from the fewest: it and all above it must be good."""
    places = set(itertools.chain.from_iterable(compared.points for compared in tried.values()))
    whole = [name for name, compared in tried.items() if places and set(compared.points) == places]

    def good(name):
        values = list(tried[name].points.values())
        return sum(values) / len(values) >= -TOLERANCE - 1e-9 and all(value >= -NOWHERE - 1e-9 for value in values)

    best = None
    for end in range(1, len(whole) + 1):
        if all(good(name) for name in whole[:end]):
            best = whole[end - 1]
    assert fewest_bits(tried) == best


# What is compared.


def test_differences_are_between_runs_of_the_same_seed():
    fedbat, fedavg = (
        [row for row in TRAFFIC if row.point["method"] == method and row.point["down"] == FULL][:1]
        for method in ("fedbat", "fedavg")
    )
    records = [*runs(lambda _: 1.0, fedbat), *runs(lambda _: 7.0, fedbat, 1), *runs(lambda _: 0.0, fedavg, 1)]
    assert choices(*records).compare(Choice("fedbat"), Choice("fedavg")).points == {PLACES[0]: pytest.approx(-7)}
    assert not choices(*records[:1], records[2]).compare(Choice("fedbat"), Choice("fedavg")).points


def test_a_run_without_an_averaged_model_stands_in_and_is_compared_by_the_model_itself():
    """A made-up averaged model is a point above the model."""
    kept = runs(lambda point: 0.0 if (point["method"], point["down"]) == ("fedbat", FULL) else None)[0]
    plain = next(row for row in BOOK.tables["table1"].rows if row.point["method"] == "fedavg")
    other = without_average(made_up(plain, 90.5))
    found = choices(kept, other)
    assert found.compare(Choice("fedbat"), Choice("fedavg")).points == {PLACES[0]: pytest.approx(-0.5)}
    page = "\n".join(BLOCKS["every-choice"](found))
    assert "| 90.5/90.5/– |" in page and "| 90.0/90.0/91.0 |" in page


def test_what_averaging_gains_is_told_for_the_seeds_that_kept_an_average():
    """Another seed of the same training that kept none, and did worse, makes no difference."""
    kept = runs(lambda point: 0.0 if (point["method"], point["down"]) == ("fedbat", FULL) else None)[0]
    same = next(row for row in BOOK.tables["table1"].rows if row.point["method"] == "fedbat")
    other = without_average(made_up(same, 80, 1))
    found = choices(kept, other)
    assert found.of_split("iid")[0].last10.mean == 85
    assert "| iid | +0.00 (1) | +1.00 (1) |" in BLOCKS["swings"](found)


def test_bits_up_are_recommended_for_each_split():
    by_method = {"fedavg": 0.0, "fedbat": 0.6, "fedbat bits=2": 0.4, "fedbat bits=4": 0.0}

    def cost(point):
        skew = 1.0 if point["split"] == "non-iid-2" else 0.5
        return by_method[point["method"]] * skew if point["method"] in by_method and point["down"] == FULL else None

    lines = "\n".join(BLOCKS["uplink"](choices(*runs(cost))))
    assert re.findall(r"- (\S+): \*\*(\d)", lines) == [("iid", "1"), ("non-iid-1", "1"), ("non-iid-2", "2")]
    one_bit = choices(*runs(lambda point: cost(point) if "=" not in point["method"] else None))
    told = " ".join("\n".join(BLOCKS["uplink"](one_bit)).split())
    assert "non-iid-2: **1 bit loses too much**. " in told
    assert "-0.60 with 1 bit; 2 and 4 bits not measured yet." in told
    assert {choice.method for choice in BITS.values()} < {row.point["method"] for row in TRAFFIC}


@pytest.mark.parametrize("block", ["commands", "flower"])
def test_a_command_for_what_has_no_record_says_so(block):
    def remarks(**found):
        rows = [row for row in TRAFFIC if any(row.point[key] == value for key, value in found.items())]
        text = "\n".join(BLOCKS[block](choices(*(made_up(row, 90) for row in rows))))
        about = ("the same", "two bits")
        return [bool(re.search(rf"# .*{words}.* \(not measured yet\)$", text, re.M)) for words in about]

    assert remarks() == [True, True]
    assert remarks(down=FOLLOW) == [False, True] and remarks(method="fedbat bits=2") == [True, False]


def test_every_choice_with_a_record_has_its_row_and_the_others_are_named():
    left_out = Choice("fedbat", FOLLOW)
    records = runs(lambda point: None if Choice(point["method"], point["down"]) == left_out else 1.0)
    page = "\n".join(BLOCKS["every-choice"](choices(*records)))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    shown = {(row[0].strip("`"), row[2]) for row in rows}
    assert shown == {(row.point["method"], row.point["down"]) for row in TRAFFIC} - {left_out}
    assert page.count("Not measured yet: `fedbat` (down follow).") == 2
    assert all(row[-4:] == ["1", "3", "4", f"{2 * WHOLE / 4000:.1f}x"] for row in rows)
