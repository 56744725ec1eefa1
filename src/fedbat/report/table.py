"""The table of all runs: one row each, sortable by any column."""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedbat.experiment import split_of
from fedbat.figures import late
from fedbat.report.charts import Style
from fedbat.report.runs import SPLIT, Group, Run, label_of, varying
from fedbat.units import megabytes

_LATE = "last 10"


class _Column(NamedTuple):
    title: str
    value: Callable[[Run], Any]  # to sort by
    text: Callable[[Any], str] = str
    hint: str = ""
    told_once: bool = False  # above the table, if all runs agree


def _figure(name: str) -> Callable[[Run], Any]:
    return lambda run: run.record.summary.get(name)


# What tells runs apart comes first, then what they are compared by; these fit on a narrow screen.
_COLUMNS = (
    _Column("data set", lambda run: run.config["dataset"], told_once=True),
    _Column("split", lambda run: split_of(run.config), told_once=True),
    _Column("model", lambda run: run.config["model"], told_once=True),
    _Column("best", lambda run: run.record.best, "{:.2f}".format, "test accuracy of the best round, %"),
    _Column(
        _LATE, Run.late, "{:.2f}".format, "mean test accuracy of the last ten rounds, of fewer than 20 the last, %"
    ),
    _Column("received", lambda run: run.late("received"), "{:.2f}".format, "the same of what clients receive, %"),
    _Column("averaged", lambda run: run.late("averaged"), "{:.2f}".format, "the same of the averaged model, %"),
    _Column("uplink", _figure("uplink_bytes_per_client_round"), megabytes, "sent up by a client in a round, mean"),
    _Column("up + down", lambda run: run.record.total_bytes, megabytes, "both ways, by a client in a round, mean"),
    _Column("saved up", _figure("uplink_saving"), "{:.1f}x".format, "how many times less goes up than in float32"),
    _Column("saved both", _figure("total_saving"), "{:.1f}x".format, "the same of both ways together"),
    _Column("bit/param", _figure("bits_per_parameter"), "{:.3f}".format, "bits sent up for each parameter"),
    _Column("N", lambda run: run.config["clients"], "{:,}".format, "clients", told_once=True),
    _Column("K", lambda run: run.config["per_round"], "{:,}".format, "clients sampled in each round", told_once=True),
    _Column("seed", lambda run: run.config["seed"], told_once=True),
    _Column("rounds", lambda run: len(run.record.lines), str, "that are done", told_once=True),
    _Column("seconds", _figure("seconds"), "{:,.0f}".format, "of all rounds"),
    _Column("device", lambda run: run.device, told_once=True),
    _Column("precision", lambda run: run.precision, told_once=True),
)
_FOLDER = _Column("folder", lambda run: run.name, hint="where it is recorded")
_IN_A_COLUMN = (*SPLIT, "method", "settings", "down", "model", "per_round", "rounds", "seed")


def overview(groups: Sequence[Group], anchors: Mapping[Run, str], styles: Mapping[Run, Style]) -> str:
    """The table as HTML, group by group, the best methods first; above it, what is the same for all runs."""
    runs = [run for group in groups for run in group.runs]
    fields = varying(runs, _IN_A_COLUMN)
    names = {run: label_of(run, fields) for run in runs}
    once = [column for column in _COLUMNS if column.told_once and len({column.value(run) for run in runs}) == 1]
    columns = [
        column for column in _COLUMNS if column not in once and any(column.value(run) is not None for run in runs)
    ]
    if len({(names[run], *(column.value(run) for column in columns if column.told_once)) for run in runs}) < len(runs):
        columns.append(_FOLDER)
    few = late(max(len(run.record.lines) for run in runs))[0]
    head = [_head("method", "with what is not at its default")]
    head += [_head(few if column.title == _LATE else column.title, column.hint) for column in columns]
    rows = (
        f"<tr>{_method(run, names[run], anchors[run], styles[run])}{''.join(_cell(c, run) for c in columns)}</tr>"
        for run in runs
    )
    shared = ", ".join(
        f"{column.title} {column.text(value)}" for column in once if (value := column.value(runs[0])) is not None
    )
    table = f"<table><thead><tr>{''.join(head)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    above = f"<p>All runs: {html.escape(shared)}.</p>\n" if shared else ""
    return f'{above}<div class="overview">{table}</div>'


def _head(title: str, hint: str) -> str:
    return f'<th scope="col" title="{html.escape(hint)}"><button type="button">{title}</button></th>'


def _method(run: Run, name: str, anchor: str, style: Style) -> str:
    shown = html.escape(name)
    note = "" if run.status == "finished" else f" <small>{html.escape(run.status)}</small>"
    return f'<td data-value="{shown}"><a href="#{anchor}">{style.sample}{shown}</a>{note}</td>'


def _cell(column: _Column, run: Run) -> str:
    value = column.value(run)
    shown, key = ("–", "") if value is None else (column.text(value), str(value))
    number = isinstance(value, int | float) or (value is None and column.text is not str)
    kind = ' class="number"' if number else ""
    return f'<td{kind} data-value="{html.escape(key)}">{html.escape(shown)}</td>'
