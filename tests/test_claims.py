"""Claims: what is compared, the intervals behind it, the verdicts, and the file of them."""

import dataclasses
import itertools
import math
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from fedbat.cli import app
from fedbat.errors import ConfigError
from fedbat.figures import figures_of
from fedbat.methods import make_method
from fedbat.reproduce import Record, Records, load_book
from fedbat.reproduce.claims import Claim, Group, Verdict, judge, judge_all, load_claims
from fedbat.reproduce.estimates import LEVEL, QUANTIFIERS, Estimate, Region, Spread, joint_spread, own_spread
from fedbat.reproduce.evidence import render_evidence
from fedbat.reproduce.kinds import KINDS, Shelf
from fedbat.reproduce.metrics import METRICS, weighted_error
from fedbat.reproduce.publish import publish
from fedbat.reproduce.report import render
from fedbat.reproduce.results import Results
from fedbat.reproduce.verdicts import EVIDENCE, HEADER, claim_row, evidence_rows
from tests.made_up import EXPERIMENTS

BOOK = load_book(EXPERIMENTS)
SHELF = Shelf(BOOK)
CLAIMS = load_claims(EXPERIMENTS)
LAYERS = {"0.weight": 288, "17.weight": 2560}  # the first and the last of the CNN, with their sizes
SPLITS = ("iid", "non-iid-1", "non-iid-2")


def run(
    method, accuracy, seed=0, *, split="iid", dataset="fmnist", clients=100, curve=None, errors=(0.5, 0.5), bits=1.0
):
    """A whole record made up: flat at `accuracy` percent, or along a `curve` of percents."""
    experiment = SHELF.row(dataset, str(clients), split, method).cell(seed).experiment
    accuracies = [value / 100 for value in curve or [accuracy] * experiment.rounds]
    layers = {
        name: {"relative_error": error, "step": 1.0, "clipped": 0.0} for name, error in zip(LAYERS, errors, strict=True)
    }
    lines = [
        {"round": i + 1, "accuracy": value, "layers": layers, "loss": 1.0, "clients": [0], "seconds": 1.0}
        | {"uplink_bytes": bits, "uplink_nbits": 8 * bits, "downlink_bytes": 1}
        for i, value in enumerate(accuracies)
    ]
    summary = {
        "status": "finished",
        "config": dataclasses.asdict(experiment) | {"rounds": len(lines)},
        "method_settings": make_method(experiment.method, experiment.settings).settings(),
        "seed": seed,
        "rounds_done": len(lines),
        "num_parameters": 8,
        "num_compressed_parameters": 8,
        **figures_of(lines, 8, 8),
        "engine": {},
        "own": {},
        "resumed": [],
        "machine": {"gpu": None},
    }
    return Record(Path(method), summary, tuple(lines))


def claim(kind="difference", *, splits=("iid",), dataset="fmnist", clients=100, quantifier="every", **rest):
    region = Region(**{key: rest.pop(key) for key in ("above", "below") if key in rest})
    cells = {"dataset": [dataset], "clients": [clients], "split": splits}
    arguments = rest or {"one": "fedbat", "others": ["signsgd"]}
    return Claim("some-id", "5.2", "A claim.", kind, arguments, cells, quantifier, region)


def verdict(a_claim, *runs):
    return found(a_claim, *runs).verdict


def found(a_claim, *runs):
    return judge(a_claim, SHELF, Results(BOOK, Records(runs)))


# Every kind can hold, fail and stay open.

DIFFERENCE = claim(above=0)
ERROR = claim(one="fedbat", others=["signsgd"], metric="error", below=0)
LEVEL_OF_BITS = claim("level", methods=["signsgd"], metric="compression", above=30.4)
RISE = claim("rise", orders=[["fedbat rho=0", "fedbat rho=2", "fedbat rho=4"]], splits=["non-iid-2"], above=0)
GROWTH = claim("growth", one="fedavg", others=["signsgd"], since={"split": "iid"}, splits=["non-iid-2"], above=0)
ROUNDS = claim("rounds", one="fedbat", others=["signsgd"], smooth=1, slack=0, below=0)


def rho(*accuracies):
    return [
        run(f"fedbat rho={value}", accuracy, split="non-iid-2")
        for value, accuracy in zip((0, 2, 4), accuracies, strict=False)
    ]


def growing(*accuracies):
    """FedAvg and SignSGD on IID, then on Non-IID-2."""
    places = itertools.product(("iid", "non-iid-2"), ("fedavg", "signsgd"))
    return [run(method, value, split=split) for (split, method), value in zip(places, accuracies, strict=True)]


def rising(method, first):
    """A tenth of a point a round."""
    return run(method, None, curve=[first + i / 10 for i in range(100)])


def reaching(method, *rounds):
    """Ninety percent from the given round on, one run for each seed."""
    return [run(method, None, seed, curve=[10] * (n - 1) + [90] * (101 - n)) for seed, n in enumerate(rounds)]


@pytest.mark.parametrize(
    ("a_claim", "expected", "runs"),
    [
        (DIFFERENCE, "holds", [run("fedbat", 91), run("signsgd", 89)]),
        (DIFFERENCE, "fails", [run("fedbat", 89), run("signsgd", 91)]),
        (DIFFERENCE, "undecided", [run("fedbat", 91), run("signsgd", 90.9)]),
        (DIFFERENCE, "waiting for records", [run("fedbat", 91)]),
        (ERROR, "holds", [run("fedbat", 90, errors=(0.4, 0.4)), run("signsgd", 90)]),
        (ERROR, "fails", [run("fedbat", 90, errors=(0.5, 0.6)), run("signsgd", 90)]),
        (ERROR, "waiting for records", [run("signsgd", 90)]),
        (LEVEL_OF_BITS, "holds", [run("signsgd", 90, bits=1.01)]),
        (LEVEL_OF_BITS, "fails", [run("signsgd", 90, bits=1.157)]),
        (LEVEL_OF_BITS, "waiting for records", []),
        (RISE, "holds", rho(80, 85, 90)),
        (RISE, "fails", rho(80, 90, 80)),
        (RISE, "undecided", rho(80, 85, 85.1)),
        (RISE, "waiting for records", rho(80, 85)),
        (GROWTH, "holds", growing(91, 90, 91, 80)),
        (GROWTH, "fails", growing(91, 80, 91, 90)),
        (GROWTH, "undecided", growing(91, 90, 90, 89)),
        (GROWTH, "waiting for records", growing(91, 90, 91, 80)[:3]),
        (ROUNDS, "holds", reaching("fedbat", 20, 22, 21) + reaching("signsgd", 50, 53, 50)),
        (ROUNDS, "fails", reaching("fedbat", 50, 53, 50) + reaching("signsgd", 20, 22, 21)),
        (ROUNDS, "undecided", reaching("fedbat", 20, 50, 30) + reaching("signsgd", 40, 30, 35)),
        (ROUNDS, "undecided", [rising("fedbat", 50), rising("signsgd", 49.9)]),  # a round apart, on a gentle slope
    ],
)
def test_verdicts_of_every_kind(a_claim, expected, runs):
    assert verdict(a_claim, *runs) == expected


def test_all_kinds_and_metrics_are_tried_here_or_in_the_file():
    assert {DIFFERENCE.kind, LEVEL_OF_BITS.kind, RISE.kind, GROWTH.kind, ROUNDS.kind} == KINDS.keys()
    used = {a_claim.arguments.get("metric", "best") for a_claim in CLAIMS}
    assert used == METRICS.keys()
    assert {a_claim.quantifier for a_claim in CLAIMS} == QUANTIFIERS.keys()


# Pairing.


def test_seeds_are_paired():
    """Both swing together by points; their differences hardly move."""
    ours, theirs = [80.0, 85.0, 90.0], [79.0, 83.9, 89.1]
    paired = [run("fedbat", x, seed) for seed, x in enumerate(ours)]
    paired += [run("signsgd", x, seed) for seed, x in enumerate(theirs)]
    assert verdict(DIFFERENCE, *paired) == "holds"
    shuffled = paired[:3] + [run("signsgd", x, (seed + 1) % 3) for seed, x in enumerate(theirs)]
    assert verdict(DIFFERENCE, *shuffled) == "undecided"
    low, high = stats.ttest_ind(ours, theirs).confidence_interval(1 - LEVEL)
    assert low < 0 < high  # so would anyone say who does not pair
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    paper = math.hypot(0.15, 0.15)  # of four degrees of freedom
    error = math.sqrt((2 * statistics.variance(differences) + 4 * paper**2) / 6 / 3)
    expected = stats.t.interval(1 - LEVEL, 6, statistics.fmean(differences), error)
    assert found(DIFFERENCE, *paired).deciding.interval() == pytest.approx(expected)


def test_only_common_seeds_count():
    runs = [run("fedbat", 95, 0), run("fedbat", 90, 1), run("signsgd", 80, 1), run("signsgd", 70, 2)]
    (measured,) = found(DIFFERENCE, *runs).measured
    assert measured.estimate.seeds == 1 and measured.estimate.value == pytest.approx(10)
    apart = found(DIFFERENCE, run("fedbat", 95, 0), run("signsgd", 70, 2))
    assert apart.verdict == "waiting for records" and apart.measured[0].estimate is None


# Quantifiers. A cell is one of three splits.


def three(quantifier, *differences, **region):
    """SignSGD at 80 and FedBAT so far from it on each split; None has not been run."""
    runs = [
        found
        for split, difference in zip(SPLITS, differences, strict=True)
        if difference is not None
        for found in (run("fedbat", 80 + difference, split=split), run("signsgd", 80, split=split))
    ]
    return verdict(claim(splits=SPLITS, quantifier=quantifier, **region), *runs)


@pytest.mark.parametrize(
    ("quantifier", "differences", "expected"),
    [
        ("every", (9, 9, 9), "holds"),
        ("every", (9, 9, None), "waiting for records"),
        ("every", (None, -9, None), "fails"),
        ("some", (None, 9, None), "holds"),
        ("some", (-9, -9, None), "waiting for records"),
        ("some", (-9, -9, -9), "fails"),
        ("any", (-9, 9, None), "holds"),
        ("any", (-9, 0, -9), "undecided"),
        ("any", (-9, -9, -9), "fails"),
        ("most", (9, 9, None), "holds"),
        ("most", (9, None, None), "waiting for records"),
        ("most", (-9, -9, None), "fails"),
        ("mean", (18, 18, -9), "holds"),
        ("mean", (18, 18, None), "waiting for records"),
        ("mean", (-18, -18, 9), "fails"),
    ],
)
def test_quantifiers(quantifier, differences, expected):
    assert three(quantifier, *differences, above=0) == expected


def test_some_means_ahead_of_all_the_others_in_one_cell():
    a_claim = claim(one="fedbat", others=["signsgd", "zerofl"], splits=SPLITS[:2], quantifier="some", above=0)
    against_one = [run("fedbat", 80), run("signsgd", 70), run("zerofl", 90)]
    against_other = [run("fedbat", 80, split=SPLITS[1]), run("signsgd", 90, split=SPLITS[1])]
    against_other += [run("zerofl", 70, split=SPLITS[1])]
    assert verdict(a_claim, *against_one, *against_other) == "fails"
    against_other[1] = run("signsgd", 70, split=SPLITS[1])
    assert verdict(a_claim, *against_one, *against_other) == "holds"


def test_any_means_ahead_of_one_of_the_others():
    runs = [run("fedbat", 80), run("signsgd", 70), run("zerofl", 90)]
    others = {"one": "fedbat", "others": ["signsgd", "zerofl"]}
    assert verdict(claim(quantifier="any", above=0, **others), *runs) == "holds"
    assert verdict(claim(quantifier="some", above=0, **others), *runs) == "fails"


def test_within_a_margin_needs_the_whole_interval_inside():
    assert three("every", 0, 0, 0, above=-9, below=9) == "holds"
    assert three("every", 0, 0, 20, above=-9, below=9) == "fails" == three("every", 0, 0, -20, above=-9, below=9)
    assert three("every", 0, 0, 8.9, above=-9, below=9) == "undecided"


@pytest.mark.parametrize(("quantifier", "wrong"), [("every", False), ("some", True)])
def test_one_case_out_of_many_decides_wrongly_no_more_often_than_said(quantifier, wrong):
    """All true differences are on the border, where only half the level lies on either side."""
    rng, num_trials, num_cases = np.random.default_rng(0), 1000, 25
    decide, mistakes = QUANTIFIERS[quantifier].decide, 0
    for draws in rng.normal(size=(num_trials, num_cases, 4)):
        estimates = [[Estimate(float(draw.mean()), own_spread(draw.tolist()), 4)] for draw in draws]
        mistakes += decide(estimates, Region(above=0))(LEVEL) is wrong
    expected = LEVEL / 2
    assert abs(mistakes / num_trials - expected) < 5 * math.sqrt(expected / num_trials)


def test_the_interval_of_a_mean_is_no_narrower_than_that_of_cases_which_move_together():
    together = [[Estimate(value, Spread(1.0, 4, "paper"), 1)] for value in (1.0, 2.0, 3.0)]
    mean = QUANTIFIERS["mean"].deciding(together, Region())
    low, high = mean.interval()
    assert mean.value == 2 and high - low == pytest.approx(2 * stats.t.ppf(0.975, 4))


# With one seed.


def spread_of(metric, *runs):
    (measured,) = found(claim(one="fedbat", others=["signsgd"], metric=metric, above=0), *runs).measured
    return measured.estimate.spread


@pytest.mark.parametrize(
    ("point", "std"),
    [
        (("fmnist", "100", "non-iid-2", "fedbat"), 0.4),
        (("cifar10", "100", "non-iid-2", "fedbat"), 0.6),  # Table 5 has the same cell without one
        (("fmnist", "100", "non-iid-2", "fedbat rho=4"), 0.4),  # a variant has its method's
        (("fmnist", "200", "non-iid-2", "signsgd"), 1.3),  # the larger of those with 30 and 100 clients
        (("cifar10", "100", "non-iid-2", "fedpaq bits=3"), 1.0),  # the largest of all methods
    ],
)
def test_the_nearest_standard_deviation_of_the_paper(point, std):
    assert SHELF.std(SHELF.row(*point)) == std


def test_what_stands_in_for_the_spread_between_seeds():
    flat = [run("fedbat", 80), run("signsgd", 70)]
    rounded_up = Spread(math.hypot(0.1 + 0.05, 0.1 + 0.05), 4, "paper")  # the paper prints 0.1 for both
    assert spread_of("best", *flat) == rounded_up
    assert spread_of("last-ten", *flat) == rounded_up._replace(measured=False)  # it is that of best rounds
    swinging = [run("fedbat", None, curve=[80, 90] * 50), run("signsgd", 70)]
    last_ten = spread_of("last-ten", *swinging)
    assert last_ten.source == "rounds" and last_ten.std == pytest.approx(statistics.stdev([80, 90] * 5))
    assert spread_of("bits", *flat) == Spread(0.0, math.inf, "exact", measured=False)
    more = [run("fedbat", 81, 1), run("signsgd", 70, 1)]
    assert [spread_of(name, *flat, *more).source for name in ("best", "last-ten")] == ["seeds, paper", "seeds"]


def test_a_second_seed_does_not_make_an_interval_wider():
    """Student's quantile for two values is six times that for three: alone, two seeds would say less than one."""
    one = [run("fedbat", 80), run("signsgd", 79)]
    two = [run("fedbat", 80.1, 1), run("signsgd", 79, 1)]
    narrow, wide = (_interval(found(DIFFERENCE, *runs)) for runs in (one + two, one))
    assert narrow[1] - narrow[0] < wide[1] - wide[0]


def _interval(judged):
    (case,) = judged.measured
    return case.estimate.interval()


def test_seeds_and_what_is_expected_are_joined_by_degrees_of_freedom():
    own, paper, bound = Spread(3.0, 1, "seeds"), Spread(1.0, 4, "paper"), Spread(9.0, 99, "rounds", measured=False)
    assert joint_spread(own, [paper, bound]) == (pytest.approx(math.sqrt((9 + 4) / 5)), 5, "seeds, paper", True)
    assert joint_spread(own, [bound]) == own
    assert joint_spread(None, [paper, bound]) == bound and joint_spread(None, [paper]) == paper
    assert joint_spread(None, []).reach(LEVEL) == math.inf


def test_rounds_to_a_target_move_as_far_as_a_slope_lets_them():
    """On a line of half a point a round, an accuracy that is off by s points comes 2 s rounds sooner or later."""
    line = [min(90, 40 + 0.5 * i) for i in range(100)]
    pair = [run("fedbat", None, curve=line), run("signsgd", None, curve=line)]
    a_claim = claim("rounds", one="fedbat", others=["signsgd"], smooth=1, slack=5, below=0)
    (case,) = found(a_claim, *pair).measured
    spread = case.estimate.spread
    assert spread.source == "curves" and spread.std == pytest.approx(2 * math.hypot(0.15, 0.15), abs=1)  # the paper's


# What is measured.


def test_the_error_is_weighted_by_parameters_in_runs_and_in_records(tmp_path):
    a_run = run("fedbat", 90, errors=(0.9, 0.3))
    expected = (288 * 0.9 + 2560 * 0.3) / (288 + 2560)
    assert weighted_error(a_run) == pytest.approx([expected] * 100)
    assert weighted_error(publish(a_run, tmp_path / "record")) == pytest.approx([expected] * 100)
    assert weighted_error(run("fedbat", 90, errors=(None, 0.3)))[0] == pytest.approx(0.3)  # a diverged layer


def rounds_between(one, other, **settings):
    a_claim = claim("rounds", one="fedbat", others=["signsgd"], below=0, **{"smooth": 1, "slack": 0} | settings)
    return found(a_claim, run("fedbat", None, curve=one), run("signsgd", None, curve=other)).deciding.value


def test_rounds_to_the_lower_of_two_bests():
    steady = [*range(1, 91), *[90] * 10]  # percent at round 1, 2, ...
    assert rounds_between([x / 2 for x in steady], steady) == 90 - 45
    assert rounds_between(steady, [x / 2 for x in steady]) == 45 - 90
    assert rounds_between(steady, [x / 2 for x in steady], slack=5) == 40 - 80
    lucky = [10, 10, 45, *[10] * 47, *[45] * 50]
    assert rounds_between(lucky, [10] * 20 + [45] * 80) == 3 - 21
    assert rounds_between(lucky, [10] * 20 + [45] * 80, smooth=5) == 55 - 25


# The file.


def test_every_claim_names_cells_that_experiment_files_have():
    for shelf in (SHELF, Shelf(load_book(EXPERIMENTS, "text"))):
        for a_claim in CLAIMS:
            cases = a_claim.cases(shelf) + [a_claim.trial_cases(shelf)] * (a_claim.trials is not None)
            assert [bool(cases), bool(a_claim.tests), bool(a_claim.unchecked)].count(True) == 1, a_claim.id
            assert all(cell for cell in cases)


def test_every_table_and_figure_has_its_claims_and_texts_fit_into_a_table():
    places = " ".join(a_claim.where for a_claim in CLAIMS)
    assert all(table.label in places for table in BOOK.tables.values() if table.label)
    assert not [a_claim.id for a_claim in CLAIMS if "|" in a_claim.text + a_claim.where]


def test_what_the_paper_claims_of_its_own_numbers():
    """Without any record; three sentences of section 5.3 are not quite what its tables say."""
    printed = {finding.claim.id: finding.printed for finding in judge_all(BOOK, Records(()))}
    fails = {name for name, said in printed.items() if said == "fails"}
    assert fails == {"rising-until-10", "broad-phi", "far-phi-is-worse"}
    assert Verdict.UNDECIDED not in printed.values()


def test_records_that_repeat_the_papers_numbers_never_contradict_it():
    rows = {row.identity: row for table in BOOK.tables.values() for row in table.rows if row.paper}
    points = [(row.paper.accuracy, row.point) for row in rows.values()]
    runs = [run(p["method"], x, split=p["split"], dataset=p["dataset"], clients=p["clients"]) for x, p in points]
    held = set()
    for a_claim in CLAIMS:
        if a_claim.kind not in (None, "rounds") and a_claim.arguments.get("metric", "best") == "best":
            finding = found(a_claim, *runs)
            assert finding.verdict in (finding.printed, Verdict.UNDECIDED, Verdict.WAITING), a_claim.id
            held |= {a_claim.id} if finding.verdict == "holds" else set()
    assert held >= {
        "above-stoc-signsgd",
        "above-zerofl",
        "near-fedavg",
        "variants-above-signsgd",
        "bifl-full-above-bifl",
    }


ENTRY = """
[cells.small]
dataset = ["fmnist"]
clients = [100]
split = ["iid"]
[[claim]]
id = "a"
where = "5"
text = "t"
"""


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("kind = 'ratio'\ncells = 'small'\nquantifier = 'every'\nabove = 0", "kind = 'ratio', choose from difference"),
        ("kind = 'level'\ncells = 'large'\nquantifier = 'every'\nabove = 0", "choose from small"),
        ("kind = 'level'\ncells = 'small'\nabove = 0", "quantifier = None, choose from every"),
        ("kind = 'level'\ncells = 'small'\nquantifier = 'every'", "neither above nor below"),
        ("tests = ['tests/test_claims.py::test_nothing']", "which is no test"),
        ("tests = ['tests/nothing.py::test_nothing']", "which is no test"),
    ],
)
def test_mistakes_in_the_file_are_told(tmp_path, rest, message):
    (tmp_path / "claims.toml").write_text(ENTRY + rest)
    with pytest.raises(ConfigError, match=message):
        load_claims(tmp_path)


def test_an_id_stands_for_one_claim(tmp_path):
    (tmp_path / "tests.py").write_text("def test_this(): ...")
    again = ENTRY.partition("[[claim]]")[2]
    test = "tests = ['tests.py::test_this']\n"
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "claims.toml").write_text(ENTRY + test)
    assert load_claims(folder)[0].tests == ("tests.py::test_this",)
    (folder / "claims.toml").write_text(ENTRY + test + "[[claim]]" + again + test)
    with pytest.raises(ConfigError, match="a twice"):
        load_claims(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": ["fedbat"], "metric": "speed"}, "unknown metric 'speed'; choose from best"),
        (
            {"methods": ["fedbat rho=5"], "metric": "best"},
            "no experiment file has fmnist, 100 clients, iid, fedbat rho=5",
        ),
        ({"method": "fedbat", "metric": "best"}, "unexpected keyword argument 'method'"),
    ],
)
def test_mistakes_in_a_claim_are_told(arguments, message):
    with pytest.raises(ConfigError, match=f"claim 'some-id'.*{message}"):
        claim("level", above=0, **arguments).cases(SHELF)


# In words.


def test_a_finding_in_words():
    runs = [run("fedbat", 91, seed) for seed in (0, 1)] + [run("signsgd", 89, 0), run("signsgd", 88.8, 1)]
    row = dict(zip(HEADER, claim_row(found(DIFFERENCE, *runs)), strict=True))
    assert (row["id"], row["claim"], row["verdict"], row["cells"]) == ("some-id", "A claim.", "holds", "2 of 2")
    assert row["for / against / open"] == "1 / 0 / 0" and row["the paper's numbers"] == "holds"
    assert row["decided by"] == "+2.10 [+1.74, +2.46] fedbat − signsgd, fmnist, 100 clients, iid"
    ((*where, value, interval, seeds, source, says),) = evidence_rows(found(DIFFERENCE, *runs))
    assert (value, interval, seeds, source, says) == ("+2.10", "[+1.74, +2.46]", "2", "seeds, paper", "for")
    assert len(where) + 5 == len(EVIDENCE)


def page_of(*runs):
    return render(BOOK, Records(runs), Path("figures"))


def test_the_page_has_every_claim_with_its_verdict_and_the_summary_counts_them():
    runs = [run("fedbat", 91, bits=1.157), run("signsgd", 89, bits=1.157)]
    page, findings = page_of(*runs), judge_all(BOOK, Records(tuple(runs)))
    assert all(f"| {a_claim.text} | {a_claim.where} |" in page for a_claim in CLAIMS)
    summary = page.split("## To be looked into")[0]
    counted = {}
    for group in Group:
        (line,) = (line for line in summary.splitlines() if line.startswith(f"| {group} |"))
        counts = [int(cell.strip() or 0) for cell in line.split("|")[2:-1]]
        counted |= {(group, verdict): count for verdict, count in zip(Verdict, counts, strict=True)}
    for (group, verdict), count in counted.items():
        members = [finding for finding in findings if finding.claim.group == group]
        assert count == sum(finding.verdict == verdict for finding in members)
    failed = [finding.claim for finding in findings if finding.verdict == "fails"]
    assert {a_claim.id for a_claim in failed} == {"factor-32", "factor-32-message", "one-bit"}
    assert all(f"- **{a_claim.id}** fails: {a_claim.text}. Found: " in summary for a_claim in failed)
    assert "to within five percent. Found: 27.66." in summary


def test_what_speaks_against_a_claim_that_is_still_open_is_in_the_summary():
    """One comparison, out of 48, at the level of one alone: too little to fail, too much to keep quiet about."""
    ours = [run("fedbat", 90, seed, errors=(error, error)) for seed, error in enumerate((0.35, 0.36, 0.37))]
    theirs = [run("signsgd", 90, seed, errors=(0.3, 0.3)) for seed in range(3)]
    assert verdict(ERROR, *ours, *theirs) == "fails"
    summary = page_of(*ours, *theirs).split("## To be looked into")[0]
    (line,) = (line for line in summary.splitlines() if line.startswith("- smaller-error (waiting for records): "))
    assert line.endswith("Against it: 1 of 1 comparisons, with +0.060.")


def test_a_claim_about_some_cell_is_counted_by_cells():
    runs = [run("fedbat", 80), *(run(method, 60) for method in ("signsgd", "ef-signsgd", "noisy-signsgd"))]
    runs += [run("stoc-signsgd", 60), run("zerofl", 60)]
    (nine,) = (a_claim for a_claim in CLAIMS if a_claim.id == "up-to-nine")
    row = dict(zip(HEADER, claim_row(found(nine, *runs)), strict=True))
    assert row["for / against / open"] == "1 / 0 / 23" and row["verdict"] == "holds"


def test_the_page_of_evidence_has_every_comparison_made_and_claims_lead_to_it():
    runs = [run("fedbat", 91, bits=1.157), run("signsgd", 89, bits=1.157)]
    page, shown = page_of(*runs), render_evidence(BOOK, Records(tuple(runs)), "../RESULTS.md")
    assert "| fmnist, 100 clients, iid | signsgd | 27.66 |" in shown and "](../RESULTS.md)" in shown
    headings = {line.removeprefix("## ") for line in shown.splitlines() if line.startswith("## ")}
    linked = re.findall(r"\| \[([\w-]+)\]\(CLAIMS\.md#([\w-]+)\) \|", page)
    assert all(name == anchor for name, anchor in linked) and {name for name, _ in linked} == headings


def test_what_nothing_checks_is_said_with_its_reason():
    for finding in judge_all(BOOK, Records(())):
        if finding.claim.unchecked:
            row = dict(zip(HEADER, claim_row(finding), strict=True))
            assert row["verdict"] == "not checked" and row["decided by"] == finding.claim.unchecked


def test_the_command_prints_the_claims(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    for made in (run("fedbat", 91), run("signsgd", 89, bits=1.157)):
        publish(made, tmp_path / made.place)
    arguments = ["reproduce", "--claims", "--experiments", str(EXPERIMENTS), "--results", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80 and not any(line.endswith(" ") for line in lines)
    under = None
    said = {}
    for line in lines:
        if found := re.fullmatch(r"([\w ]+) \(\d+\)", line):
            under = found[1]
        elif found := re.match(r"  (\S+?)(:|$)", line):
            said[found[1]] = under
    findings = judge_all(BOOK, Records.load(tmp_path))
    assert said == {finding.claim.id: finding.verdict for finding in findings}
    assert "waiting for records" in said.values() and "fails" in said.values()
    assert lines[-1].endswith("4 tested, 3 not checked")
    text = " ".join(result.output.split())
    assert "above-signsgd: 1 for, 0 against, 23 open; 2 of 48 cells run FedBAT is more accurate than SignSGD" in text
    assert "closest: +2.00 [+1.41, +2.59] fedbat − signsgd, fmnist, 100 clients, iid" in text
