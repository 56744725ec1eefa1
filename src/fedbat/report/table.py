"""The table of all runs: one row each, sortable by any column."""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedbat.experiment import split_of
from fedbat.report.charts import Style
from fedbat.report.runs import Group, Run
from fedbat.units import megabytes


class _Column(NamedTuple):
    title: str
    value: Callable[[Run], Any]  # to sort by
    text: Callable[[Any], str] = str
    hint: str = ""
    fewest: int = 0  # how many different values runs must have for the column to be shown; 0: it always is


def _percent(name: str) -> Callable[[Run], Any]:
    return lambda run: None if (value := run.record.summary.get(name)) is None else 100 * value


def _figure(name: str) -> Callable[[Run], Any]:
    return lambda run: run.record.summary.get(name)


def _saved_up(run: Run) -> float:
    """How many times less goes up than in float32; the first records only have the bits per parameter."""
    summary = run.record.summary
    return float(summary.get("uplink_saving", 32 / summary["bits_per_parameter"]))


# What tells runs apart comes first, then what they are compared by; these fit on a narrow screen.
_COLUMNS = (
    _Column("data set", lambda run: run.config["dataset"]),
    _Column("split", lambda run: split_of(run.config)),
    _Column("model", lambda run: run.config["model"], fewest=2),
    _Column("best", lambda run: run.record.best, "{:.2f}".format, "test accuracy of the best round, %"),
    _Column("last 10", lambda run: run.record.last10, "{:.2f}".format, "mean test accuracy of the last ten rounds, %"),
    _Column(
        "received",
        _percent("received_last10_accuracy"),
        "{:.2f}".format,
        "the same of what clients receive, %",
        fewest=1,
    ),
    _Column(
        "averaged",
        _percent("averaged_last10_accuracy"),
        "{:.2f}".format,
        "the same of the averaged model, %",
        fewest=1,
    ),
    _Column("uplink", _figure("uplink_bytes_per_client_round"), megabytes, "sent up by a client in a round, mean"),
    _Column("up + down", lambda run: run.record.total_bytes, megabytes, "both ways, by a client in a round, mean"),
    _Column("saved up", _saved_up, "{:.1f}x".format, "how many times less goes up than the float32 model"),
    _Column("saved both", lambda run: run.record.total_saving, "{:.1f}x".format, "the same of both ways together"),
    _Column("bit/param", _figure("bits_per_parameter"), "{:.3f}".format, "bits sent up for each parameter"),
    _Column("N", lambda run: run.config["clients"], "{:,}".format, "clients"),
    _Column("K", lambda run: run.config["per_round"], "{:,}".format, "clients sampled in each round"),
    _Column("seed", lambda run: run.config["seed"]),
    _Column("rounds", lambda run: len(run.record.lines), str, "that are done"),
    _Column("seconds", _figure("seconds"), "{:,.0f}".format, "of all rounds"),
    _Column("device", lambda run: run.device),
    _Column("precision", lambda run: run.precision),
)


def overview(groups: Sequence[Group], anchors: Mapping[Run, str], styles: Mapping[Run, Style]) -> str:
    """The table as HTML, group by group, the best methods first."""
    method = _head("method", "with the settings that are not at their defaults")
    runs = [run for group in groups for run in group.runs]
    columns = [c for c in _COLUMNS if len({c.value(run) for run in runs} - {None}) >= c.fewest]
    head = [method, *(_head(column.title, column.hint) for column in columns)]
    rows = (
        f"<tr>{_method(run, anchors[run], styles[run])}{''.join(_cell(column, run) for column in columns)}</tr>"
        for run in runs
    )
    return f"<table><thead><tr>{''.join(head)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _head(title: str, hint: str) -> str:
    return f'<th scope="col" title="{html.escape(hint)}"><button type="button">{title}</button></th>'


def _method(run: Run, anchor: str, style: Style) -> str:
    variant, status = html.escape(run.variant), run.record.summary.get("status")
    link = f'<a href="#{anchor}">{style.sample}{variant}</a>'
    note = "" if status == "finished" else f" <small>{html.escape(str(status))}</small>"
    return f'<td data-value="{variant}">{link}{note}</td>'


def _cell(column: _Column, run: Run) -> str:
    value = column.value(run)
    shown, key = ("–", "") if value is None else (column.text(value), str(value))
    number = isinstance(value, int | float) or (value is None and column.text is not str)
    kind = ' class="number"' if number else ""
    return f'<td{kind} data-value="{html.escape(key)}">{html.escape(shown)}</td>'
