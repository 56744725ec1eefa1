"""The summary at the top of RESULTS.md: how much was run, how near the paper it is, and what follows."""

from collections.abc import Iterator, Sequence

from fedbat.reproduce.claims import Finding, Verdict
from fedbat.reproduce.estimates import LEVEL
from fedbat.reproduce.markdown import anchor, share, span, table
from fedbat.reproduce.pace import Machine
from fedbat.reproduce.questions import TITLE, Questions
from fedbat.reproduce.record import Record
from fedbat.reproduce.results import WITHIN, Result, Results, duel, orderings
from fedbat.reproduce.sides import sides
from fedbat.reproduce.verdicts import contradicted, verdict_counts

AGAINST = ("fedavg", "signsgd", "ef-signsgd", "noisy-signsgd", "stoc-signsgd", "zerofl", "bifl")
CLAIMS = "Claims"  # the title of their section

Columns = list[dict[str, Result]]


def section(results: Results, findings: Sequence[Finding], questions: Questions) -> Iterator[str]:
    """Counts, methods against the paper, FedBAT against each of the others, and verdicts on claims."""
    columns = results.columns()
    yield from ["## Summary", ""]
    yield from table(("", "count"), _counts(results, columns, questions), [""])
    yield from _machines(results.records)
    yield from _beside_the_paper(columns)
    yield from _duels(columns)
    yield from _verdicts(findings)


def _counts(results: Results, columns: Columns, questions: Questions) -> Iterator[list[str]]:
    yield ["cells run, of all", share(len(results.found), results.num_rows)]
    yield ["runs (one for each seed)", str(len(results.records))]
    if compared := results.compared():
        usual = [{name: result for name, result in column.items() if " " not in name} for column in columns]
        single = sum(len(result.records) == 1 for result in compared)
        close = share(len(results.close()), len(compared))
        yield [f"cells within {WITHIN:g} point of the paper, of those it has", close]
        yield ["of the cells it has, measured with a single seed", share(single, len(compared))]
        open_ = f"of the cells that deviate, still [to be looked into]({anchor(TITLE)})"
        yield [open_, share(len(questions.cells), len(results.deviating()))]
        yield ["pairs of methods, all settings at their defaults, ordered as in the paper", share(*orderings(usual))]
        far = f"of these, pairs that the paper puts more than {WITHIN:g} point apart"
        yield [far, share(*orderings(usual, WITHIN))]


def _machines(records: Sequence[Record]) -> Iterator[str]:
    """Where runs were made, and by which code as far as they tell."""
    jobs: dict[str, list[int]] = {}
    for machine in map(Machine.of, records):
        jobs.setdefault(f"{machine.processor} in {machine.precision}", []).append(int(machine.jobs))
    made = "; ".join(f"{len(found)} on {where}, {span(found)} at once" for where, found in jobs.items())
    unknown = sum("source" not in record.summary.get("versions", {}) for record in records)
    untold = f" {share(unknown, len(records))} do not tell exactly which code made them." if unknown else ""
    if made:
        yield from [f"Runs: {made}.{untold}", ""]


def _beside_the_paper(columns: Columns) -> Iterator[str]:
    rows = [
        [
            f"`{side.method}`",
            *(str(len(side.results)), f"{side.mean:+.2f}", str(side.above), str(side.below)),
            "one-sided" if side.one_sided else "",
        ]
        for side in sides(columns)
    ]
    if rows:
        yield from [
            "Ours minus the paper's, best rounds in points, over all columns (data set, clients, split). A method",
            f"is *one-sided* if a coin would fall so often on one side in at most {LEVEL:.0%} of cases (sign test).",
            "",
        ]
        yield from table(("ours − paper", "columns", "mean", "above", "below", ""), rows, ["ours − paper", ""])


def _duels(columns: Columns) -> Iterator[str]:
    met = [(_spelled(columns, other), found) for other in AGAINST if (found := duel(columns, "fedbat", other))]
    header = ("FedBAT against", "columns", "ahead", "ahead in the paper", "points", "points in the paper")
    duels = [
        [f"`{other}`", *map(str, found[:3]), f"{found.difference:+.2f}", f"{found.difference_in_paper:+.2f}"]
        for other, found in met
    ]
    if duels:
        yield from ["Best rounds of runs with the same seed, over all columns in which both methods were run:", ""]
        yield from table(header, duels, header[:1])


def _spelled(columns: Columns, name: str) -> str:
    return next(column[name].row.spelled() for column in columns if name in column)


def _verdicts(findings: Sequence[Finding]) -> Iterator[str]:
    if not findings:
        return
    header = (f"[claims]({anchor(CLAIMS)})", *Verdict)
    yield from table(header, verdict_counts(findings), header[:1])
    if against := list(contradicted(findings)):
        yield from ["Claims that fail by these records, or that some intervals contradict:", ""]
        yield from [*(f"- {sentence}" for sentence in against), ""]
