"""The data from which the page's script draws, as plain values for JSON."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, zip_longest
from statistics import fmean, median
from typing import Any, NamedTuple

from fedbat.plots import method_colors, run_styles
from fedbat.report.frames import accuracy_frame, loss_frame
from fedbat.report.holdings import Holdings
from fedbat.report.runs import Group, Run


class Style(NamedTuple):
    """How a run's curve looks, wherever it appears."""

    color: str
    dash: str

    @property
    def sample(self) -> str:
        """A piece of the curve, as HTML."""
        dash = "" if self.dash == "solid" else f' stroke-dasharray="{self.dash}"'
        return f'<svg viewBox="0 0 44 8" aria-hidden="true"><path d="M0 4H44" stroke="{self.color}"{dash}/></svg>'


def styles_of(groups: Sequence[Group]) -> dict[Run, Style]:
    """The color tells the method; dashes tell its variants within a group, where solid is the plain method."""
    colors = method_colors(sorted({run.config["method"] for group in groups for run in group.runs}))
    styles: dict[Run, Style] = {}
    for group in groups:
        found = run_styles({series.label: series.runs[0].config["method"] for series in group.series}, colors)
        for series in group.series:
            color, dash = found[series.label]
            style = Style(color, ",".join(f"{length}px" for length in dash) or "solid")
            styles |= dict.fromkeys(series.runs, style)
    return styles


def group_data(group: Group, styles: Mapping[Run, Style], holdings: Holdings | str) -> dict[str, Any]:
    """The curves and clients of one group."""
    curves = [
        {"label": html.escape(label), **styles[runs[0]]._asdict(), **_curve(runs)}  # Plotly reads labels as HTML
        for label, runs in group.series
    ]
    clients = holdings.counts.T.tolist() if isinstance(holdings, Holdings) else None
    accuracies, losses = ([curve[name]["mean"] for curve in curves] for name in ("accuracy", "loss"))
    frames = {"accuracy": accuracy_frame(accuracies), "loss": loss_frame(losses)}
    return {
        "curves": curves,
        "frames": {name: frame and frame._asdict() for name, frame in frames.items()},
        "loss_top": _top(losses),
        "clients": clients,
    }


def _curve(runs: Sequence[Run]) -> dict[str, Any]:
    """A series' curve: round by round, over the runs that have come that far."""
    rounds = [[line for line in lines if line] for lines in zip_longest(*(run.record.lines for run in runs))]
    uplink = [fmean(line["uplink_bytes"] for line in lines) for lines in rounds]
    downlink = [fmean(line["downlink_bytes"] for line in lines) for lines in rounds]
    return {
        "round": [lines[0]["round"] for lines in rounds],
        "seeds": [len(lines) for lines in rounds],
        "uplink": list(map(round, accumulate(uplink))),
        "traffic": list(map(round, accumulate(map(sum, zip(uplink, downlink, strict=True))))),
        "accuracy": _spread([[100 * line["accuracy"] for line in lines] for lines in rounds]),
        "loss": _spread([[line["loss"] for line in lines] for lines in rounds]),
    }


def _spread(values: Sequence[Sequence[float | None]]) -> dict[str, list[float | None]]:
    """The mean, and the range if there are several runs; None, a gap, where one of them diverged."""
    ways: dict[str, Callable[[Any], float]] = {"mean": fmean}
    if len(values[0]) > 1:
        ways |= {"low": min, "high": max}
    return {
        name: [None if None in found else float(f"{way(found):.6g}") for found in values] for name, way in ways.items()
    }


def _top(curves: Sequence[Sequence[float | None]]) -> float | None:
    """Where the axis of losses ends, if not at the highest: a single spike would flatten all the rest."""
    known = [losses for curve in curves if (losses := [loss for loss in curve if loss is not None])]
    usual = max((max(losses[0], median(losses)) for losses in known), default=math.inf)
    return 2 * usual if max(map(max, known), default=0.0) > 2 * usual else None
