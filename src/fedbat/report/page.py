"""The page itself: one HTML file with its style, its script, its data and the plotting library inside."""

import base64
import gzip
import html
import json
import string
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from fedbat.errors import ConfigError
from fedbat.provenance import package_version
from fedbat.report.charts import Style, group_data, styles_of
from fedbat.report.contents import contents, facts, headings, summary
from fedbat.report.holdings import Holdings, holdings_of
from fedbat.report.names import as_text, flag
from fedbat.report.runs import Group, Run, Series, group_runs
from fedbat.report.table import table_of

_CHARTS = (
    ("accuracy", "round", "Test accuracy by round"),
    ("loss", "round", "Test loss by round"),
    ("accuracy", "uplink", "Test accuracy by bytes sent up"),
    ("loss", "uplink", "Test loss by bytes sent up"),
    ("accuracy", "traffic", "Test accuracy by bytes sent up and down"),
    ("loss", "traffic", "Test loss by bytes sent up and down"),
)
_SMOOTH = (
    '<button type="button" class="smooth" aria-pressed="false" '
    'title="each point is the mean of the last five rounds, or each is its own">mean of 5 rounds</button>'
)


def render(runs: Sequence[Run], title: str) -> str:
    """The page as HTML; the same runs always give the same page."""
    library, version = _library()
    groups = group_runs(runs)
    order = [run for group in groups for run in group.runs]
    anchors = {run: f"run-{number}" for number, run in enumerate(order, start=1)}
    styles = styles_of(groups)
    holdings = [holdings_of(group.config) for group in groups]
    data = [group_data(group, styles, held) for group, held in zip(groups, holdings, strict=True)]
    sections = (
        _section(number, heading, group, held, anchors, styles, drawn["frames"])
        for number, (heading, group, held, drawn) in enumerate(
            zip(headings(groups), groups, holdings, data, strict=True)
        )
    )
    return string.Template(_part("page.html")).substitute(
        title=html.escape(title),
        style=_part("page.css"),
        summary=summary(groups),
        contents=contents(groups),
        sections="".join(sections),
        fedbat=html.escape(package_version()),
        plotly=html.escape(version),
        library=base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode(),
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        script=_part("charts.js") + _part("page.js"),
    )


def _library() -> tuple[str, str]:
    """The source of plotly.js, and its version."""
    try:
        from plotly.offline import get_plotlyjs, get_plotlyjs_version
    except ImportError:
        raise ConfigError("fedbat report needs Plotly, which is not installed; pip install 'plotly>=6'") from None
    return str(get_plotlyjs()), str(get_plotlyjs_version())


def _part(name: str) -> str:
    return (resources.files(__package__) / name).read_text()


def _section(
    number: int,
    heading: str,
    group: Group,
    holdings: Holdings | str,
    anchors: Mapping[Run, str],
    styles: Mapping[Run, Style],
    frames: Mapping[str, Any],
) -> str:
    switches = (
        f'<button type="button" aria-pressed="true">{styles[series.runs[0]].sample}{_switch(series)}</button>'
        for series in group.series
    )
    charts = (
        f'<figure><figcaption>{caption}</figcaption><div class="chart" data-y="{y}" data-x="{x}"></div></figure>'
        for y, x, caption in _CHARTS
    )
    clients, note = "", holdings
    if isinstance(holdings, Holdings):
        clients, note = '<div class="chart clients"></div>', holdings.text
    return f"""
<section id="group-{number}" data-group="{number}">
<h2>{html.escape(heading)}</h2>
<p>{html.escape(facts(group))}</p>
{table_of(group, anchors, styles)}
<div class="switches">
<span class="curves">{"".join(switches)}</span>
<span><button type="button" data-all="true">all</button><button type="button" data-all="false">none</button>
{_SMOOTH}</span>
</div>
{_outside(group, frames)}<div class="charts">{"".join(charts)}</div>
<figure><figcaption>Which labels the clients hold</figcaption>{clients}<p>{html.escape(str(note))}</p></figure>
<details><summary>Configurations</summary>{"".join(_configurations(group, anchors))}</details>
</section>"""


def _outside(group: Group, frames: Mapping[str, Any]) -> str:
    """Which curves are not to be seen at first."""
    below = {place for frame in frames.values() if frame for place in frame["below"]}
    if not below:
        return ""
    labels = html.escape(", ".join(group.series[place].label for place in sorted(below)))
    return f'<p class="hint">Beyond the frame of some charts: {labels}; a double click there shows everything.</p>\n'


def _switch(series: Series) -> str:
    seeds = f" <small>{len(series.runs)} seeds</small>" if len(series.runs) > 1 else ""
    return html.escape(series.label) + seeds


def _configurations(group: Group, anchors: Mapping[Run, str]) -> Iterable[str]:
    for run, label in zip(group.runs, group.labels, strict=True):
        summary = run.record.summary
        asked = {flag(name): value for name, value in run.config.items() if name != "settings"}
        origin = {
            "recorded in": run.name,
            "status": run.status + (", edited after it was published" if run.edited else ""),
            **(summary.get("versions") or {}),
            **{f"{name}.py": digest for name, digest in summary["own"].items()},
            "revision": summary.get("git_revision"),
            **(summary.get("machine") or {}),
            **{f"engine {name}": value for name, value in (summary.get("engine") or {}).items()},
            **{f"from round {leg['first_round']} on": _engine(leg) for leg in summary["resumed"]},
        }
        tables = (
            _pairs("experiment", asked),
            _pairs("settings of the method", run.config["settings"]),
            _pairs("computed by", origin),
        )
        yield (
            f'<details id="{anchors[run]}"><summary>{html.escape(label)}</summary>'
            f'<div class="pairs">{"".join(tables)}</div></details>'
        )


def _engine(leg: Mapping[str, Any]) -> str:
    engine = leg["engine"] or {}
    return f"{engine.get('name')} ({engine.get('precision')}), PyTorch {leg['versions']['torch']}"


def _pairs(title: str, values: Mapping[str, Any]) -> str:
    known = {name: value for name, value in values.items() if value is not None}
    if not known:
        return ""
    rows = (
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(as_text(value))}</td></tr>" for name, value in known.items()
    )
    return f"<table><caption>{html.escape(title)}</caption>{''.join(rows)}</table>"
