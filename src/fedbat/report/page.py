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
from fedbat.experiment import split_of
from fedbat.provenance import package_version
from fedbat.report.charts import Style, group_data, styles_of
from fedbat.report.holdings import Holdings, holdings_of
from fedbat.report.runs import Group, Run, Series, as_text, flag, group_runs, title_of
from fedbat.report.table import overview
from fedbat.units import count

_CHARTS = (
    ("accuracy", "round", "Test accuracy by round"),
    ("loss", "round", "Test loss by round"),
    ("accuracy", "uplink", "Test accuracy by bytes sent up"),
    ("loss", "uplink", "Test loss by bytes sent up"),
    ("accuracy", "traffic", "Test accuracy by bytes sent up and down"),
    ("loss", "traffic", "Test loss by bytes sent up and down"),
)
_SHARED = (
    ("per_round", "{} client{s} a round"),
    ("rounds", "{} round{s}"),
    ("epochs", "{} local epoch{s}"),
    ("batch_size", "batch size {}"),
    ("lr", "learning rate {}"),
    ("model", "model {}"),
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
        _section(number, group, held, anchors, styles)
        for number, (group, held) in enumerate(zip(groups, holdings, strict=True))
    )
    return string.Template(_part("page.html")).substitute(
        title=html.escape(title),
        style=_part("page.css"),
        summary=_summary(groups),
        contents=_contents(groups),
        overview=overview(groups, anchors, styles),
        sections="".join(sections),
        fedbat=html.escape(package_version()),
        plotly=html.escape(version),
        library=base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode(),
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        script=_part("page.js"),
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


def _summary(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    counts = (
        count(len({run.config["method"] for run in runs}), "method"),
        count(len({run.config["dataset"] for run in runs}), "data set"),
        count(len({(run.config["dataset"], split_of(run.config)) for run in runs}), "split"),
        count(sum(len(run.record.lines) for run in runs), "round"),
    )
    return f"{count(len(runs), 'run')}: {', '.join(counts)}."


def _contents(groups: Sequence[Group]) -> str:
    """Links to the groups, if there are several."""
    if len(groups) == 1:
        return ""
    links = (
        f'<a href="#group-{number}">{html.escape(title_of(group))}</a> <small>{count(len(group.runs), "run")}</small>'
        for number, group in enumerate(groups)
    )
    return f"<nav><ul>{''.join(f'<li>{link}</li>' for link in links)}</ul></nav>"


def _section(
    number: int, group: Group, holdings: Holdings | str, anchors: Mapping[Run, str], styles: Mapping[Run, Style]
) -> str:
    shared = ((text, group.config.get(name)) for name, text in _SHARED if name not in group.varying)
    facts = [text.format(as_text(value), s="" if value == 1 else "s") for text, value in shared]
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
<h2>{html.escape(title_of(group))}</h2>
<p>{html.escape(", ".join(facts))}</p>
<div class="switches">
<span>{"".join(switches)}</span>
<span><button type="button" data-all="true">all</button><button type="button" data-all="false">none</button></span>
</div>
<div class="charts">{"".join(charts)}</div>
<figure><figcaption>Which labels the clients hold</figcaption>{clients}<p>{html.escape(str(note))}</p></figure>
<details><summary>Configurations</summary>{"".join(_configurations(group, anchors))}</details>
</section>"""


def _switch(series: Series) -> str:
    seeds = f" <small>{len(series.runs)} seeds</small>" if len(series.runs) > 1 else ""
    return html.escape(series.label) + seeds


def _configurations(group: Group, anchors: Mapping[Run, str]) -> Iterable[str]:
    for run, label in zip(group.runs, group.labels, strict=True):
        summary = run.record.summary
        asked = {flag(name): value for name, value in run.config.items() if name != "settings"}
        origin = {
            "recorded in": run.name,
            "status": run.status,
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
