"""What the page's script draws from, as plain values for JSON."""

import html
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

from fedbat.plots import method_colors, run_styles, zoom
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
    """The colour tells the method; the dashes tell its variants within a group, solid being the plain method."""
    colors = method_colors(sorted({run.config["method"] for group in groups for run in group.runs}))
    styles = {}
    for group in groups:
        found = run_styles({run.variant: run.config["method"] for run in group.runs}, colors)
        for run in group.runs:
            color, dash = found[run.variant]
            styles[run] = Style(color, ",".join(f"{length}px" for length in dash) or "solid")
    return styles


def group_data(group: Group, styles: Mapping[Run, Style], holdings: Holdings | str) -> dict[str, Any]:
    """Curves and clients of one group."""
    curves = [
        {"label": html.escape(label), **styles[run]._asdict(), **_curve(run)}  # Plotly reads labels as HTML
        for run, label in zip(group.runs, group.labels, strict=True)
    ]
    low, high = zoom(curve["accuracy"] for curve in curves)
    return {
        "curves": curves,
        "accuracy_range": [max(low, 0.0), high],
        "loss_range": _loss_range([curve["loss"] for curve in curves]),
        "clients": holdings.counts.T.tolist() if isinstance(holdings, Holdings) else None,
    }


def _curve(run: Run) -> dict[str, Any]:
    """Round by round; what a diverged run has no number for is a gap."""
    lines = run.record.lines
    return {
        "round": [line["round"] for line in lines],
        "uplink": list(accumulate(run.record.uplink_bytes)),
        "traffic": list(accumulate(run.record.traffic_bytes)),
        "accuracy": [round(100 * value, 4) for value in run.record.accuracy],
        "loss": [None if line["loss"] is None else float(f"{line['loss']:.4g}") for line in lines],
    }


def _loss_range(curves: Sequence[Sequence[float | None]]) -> list[float] | None:
    """From the least to where a run starts or spends half its time: one spike would flatten all the rest."""
    known = [positive for losses in curves if (positive := [loss for loss in losses if loss])]
    if not known:
        return None
    return [min(map(min, known)), max(max(losses[0], median(losses)) for losses in known)]
