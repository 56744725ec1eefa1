"""The table printed after runs: the figures people compare."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from fedbat.cli.options import console, new_table, say, short_names
from fedbat.experiment import Federation, variants_of
from fedbat.figures import at_chance, late
from fedbat.records import summarize
from fedbat.reproduce.estimates import UNKNOWN, Estimate, own_spread
from fedbat.reproduce.verdicts import show_interval
from fedbat.simulation import Round
from fedbat.units import megabytes

Done = tuple[Federation, list[Round]]

_Figure = Callable[[Sequence[Round]], float | None]


def by_variant(done: Sequence[Done]) -> dict[str, list[Done]]:
    """Group runs that differ in nothing but their seeds."""
    found: dict[str, list[Done]] = {}
    for variant, one in zip(variants_of([federation.experiment for federation, _ in done]), done, strict=True):
        found.setdefault(variant, []).append(one)
    return found


def print_table(done: Sequence[Done]) -> None:
    """Print a line for each variant: percent, bits per parameter, and how many times less is sent than in float32.

    Accuracies over several seeds are means with standard deviations. Traffic is up and down, over all clients and
    rounds of a run.
    """
    found = by_variant(done)
    variants = {name: found[label] for label, name in short_names(list(found)).items()}
    last, tail = late(min(len(found) for _, found in done))
    several = len(variants) < len(done)  # their wider figures leave no room for all columns
    few, all_ = ("run", "best %", last), ("bits up", "down", "saved up", "both", "traffic", "seconds")
    table = new_table(*few, *(all_[2:-1] if several else all_))
    for label, runs in variants.items():
        summaries = [summarize(federation, found) for federation, found in runs]
        s = {key: statistics.fmean(one[key] for one in summaries) for key in _MEANS}
        traffic = statistics.fmean(sum(r.uplink_bytes + r.downlink_bytes for r in found) for _, found in runs)
        figures = (
            f"{s['bits_per_parameter']:.2f}",
            f"{8 * s['downlink_bytes_per_client_round'] / s['num_parameters']:.2f}",
            *(f"{s[key]:.1f}x" for key in ("uplink_saving", "total_saving")),
            megabytes(traffic),
            f"{s['seconds']:.0f}",
        )
        accuracies = (_percent(runs, figure) for figure in _accuracies(tail))
        table.add_row(label, *accuracies, *(figures[2:-1] if several else figures))
    console.print(table)
    if not several:
        console.print("bits: a parameter, biases, norms and headers included", style="dim")
    console.print("saved: against float32; traffic: all clients and rounds", style="dim")
    _print_other_models(variants, last, tail)
    if several:
        console.print(f"means ± standard deviations over {len(done) // len(variants)} seeds", style="dim")
        _print_differences(variants, last, tail)
    _print_chance(variants)


_MEANS = (
    "bits_per_parameter",
    "downlink_bytes_per_client_round",
    "num_parameters",
    "uplink_saving",
    "total_saving",
    "seconds",
)


def _accuracies(tail: slice) -> tuple[_Figure, _Figure]:
    """The accuracies of the best round, and of the last ones."""
    return (
        lambda found: max(r.accuracy for r in found),
        lambda found: statistics.fmean(r.accuracy for r in found[tail]),
    )


def _print_differences(variants: Mapping[str, list[Done]], last: str, tail: slice) -> None:
    """Print how variants differ from the first: runs of one seed share split, initial weights, clients and batches."""
    (first, base), *others = variants.items()
    if not others:
        return
    table = new_table(f"against {first}, points", "best", last)
    for label, runs in others:
        table.add_row(label, *(_difference(runs, base, figure) for figure in _accuracies(tail)))
    console.print(table)
    console.print("differences between runs of the same seed, with Student's 95 % intervals", style="dim")


def _difference(runs: Sequence[Done], base: Sequence[Done], figure: _Figure) -> str:
    ours, theirs = ({one.experiment.seed: figure(found) or 0.0 for one, found in side} for side in (runs, base))
    values = [100 * (ours[seed] - theirs[seed]) for seed in ours]
    estimate = Estimate(statistics.fmean(values), own_spread(values) or UNKNOWN, len(values))
    return f"{estimate.value:+.2f} {show_interval(estimate, '+.2f')}"


def _print_other_models(variants: Mapping[str, list[Done]], last: str, tail: slice) -> None:
    """Print how the model as clients receive it and the averaged model do; nothing if there is neither."""
    models: dict[str, _Figure] = {
        "the model": lambda found: statistics.fmean(r.accuracy for r in found[tail]),
        "received": lambda found: _mean_of("received", found[tail]),
        "averaged": lambda found: _mean_of("averaged", found[tail]),
    }
    rows = {label: [_percent(runs, figure) for figure in models.values()] for label, runs in variants.items()}
    if all(text == _NONE for _, *others in rows.values() for text in others):
        return
    table: Table = new_table(f"{last}, %", *models)
    for label, texts in rows.items():
        table.add_row(label, *texts)
    console.print(table)


def _print_chance(variants: Mapping[str, list[Done]]) -> None:
    """Say which variants ended no better than a guess, and what to try."""
    num_classes = next(iter(variants.values()))[0][0].data.spec.num_classes
    lost = [
        name for name, runs in variants.items() if any(at_chance(found[-1].accuracy, num_classes) for _, found in runs)
    ]
    if lost:
        whose = f"{', '.join(lost)}: " if len(variants) > 1 else ""
        say(f"{whose}accuracy ends at chance ({100 / num_classes:.3g} %): try more rounds, or a lower --lr")


_NONE = "–"


def _mean_of(model: str, found: Sequence[Round]) -> float | None:
    tested = [getattr(r, model) for r in found]
    return statistics.fmean(one.accuracy for one in tested) if all(tested) else None


def _percent(runs: Sequence[Done], figure: _Figure) -> str:
    values = [100 * value for _, found in runs if (value := figure(found)) is not None]
    if len(values) < len(runs):
        return _NONE
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"
