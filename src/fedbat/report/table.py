"""A group's table: a row for each series of runs, which opens to its seeds, sortable by any column."""

import html
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fedbat.figures import late
from fedbat.report.charts import Style
from fedbat.report.runs import Group, Run
from fedbat.units import megabytes

_LATE = "last 10"


class _Column(NamedTuple):
    title: str
    value: Callable[[Run], Any]
    text: Callable[[Any], str] = str
    hint: str = ""
    spread: bool = False  # whether the mean of seeds has a standard deviation

    def of(self, runs: Sequence[Run]) -> tuple[str, str]:
        """What is shown of runs that differ only in their seeds, and what to sort by."""
        values = [value for run in runs if (value := self.value(run)) is not None]
        if not values:
            return "–", ""
        if isinstance(values[0], str):
            return "; ".join(dict.fromkeys(values)), values[0]
        spread = f" ± {self.text(stdev(values))}" if self.spread and len(values) > 1 else ""
        return self.text(fmean(values)) + spread, str(fmean(values))


def _figure(name: str) -> Callable[[Run], Any]:
    return lambda run: run.record.summary.get(name)


# What runs are compared by comes first; that fits on a narrow screen.
_COLUMNS = (
    _Column("best", lambda run: run.record.best, "{:.2f}".format, "test accuracy of the best round, %", spread=True),
    _Column(
        _LATE,
        Run.late,
        "{:.2f}".format,
        "mean test accuracy of the last ten rounds, of fewer than 20 the last, %",
        spread=True,
    ),
    _Column("received", lambda run: run.late("received"), "{:.2f}".format, "the same of what clients receive, %", True),
    _Column("averaged", lambda run: run.late("averaged"), "{:.2f}".format, "the same of the averaged model, %", True),
    _Column("uplink", _figure("uplink_bytes_per_client_round"), megabytes, "sent up by a client in a round, mean"),
    _Column("up + down", lambda run: run.record.total_bytes, megabytes, "both ways, by a client in a round, mean"),
    _Column("saved up", _figure("uplink_saving"), "{:.1f}x".format, "how many times less goes up than in float32"),
    _Column("saved both", _figure("total_saving"), "{:.1f}x".format, "the same of both ways together"),
    _Column("bit/param", _figure("bits_per_parameter"), "{:.3f}".format, "bits sent up for each parameter"),
    _Column("seconds", _figure("seconds"), "{:,.0f}".format, "of all rounds"),
)
_WORDS = (_Column("device", lambda run: run.device), _Column("precision", lambda run: run.precision))


def computed_on(group: Group) -> list[str]:
    """The device and the precision, each if all runs share it: the others have a column."""
    pairs = zip(("on {}", "in {}"), _WORDS, strict=True)
    return [form.format(value) for form, column in pairs if (value := _shared(column, group))]


def table_of(group: Group, anchors: Mapping[Run, str], styles: Mapping[Run, Style]) -> str:
    """The table as HTML, the best methods first."""
    columns = [column for column in _COLUMNS if any(column.value(run) is not None for run in group.runs)]
    columns += [column for column in _WORDS if _shared(column, group) is None]
    several = len(group.series) < len(group.runs)
    few = late(max(len(run.record.lines) for run in group.runs))[0]
    head = [_head("method", "with what is not as in most of these runs")]
    head += [_head("seeds", "how many; a click shows each")] if several else []
    head += [_head(few if column.title == _LATE else column.title, column.hint) for column in columns]
    bodies = []
    for label, runs in group.series:
        link = f'<a href="#{anchors[runs[0]]}">{styles[runs[0]].sample}{html.escape(label)}</a>'
        if len(runs) == 1 and "seed" in group.varying and label not in group.labels:
            link += f" <small>seed {runs[0].config['seed']}</small>"
        done = [run for run in runs if not run.unfinished] or runs
        rows = [[_cell(f"{link}{_notes(runs)}", label), *[_seeds(label, len(done), len(runs))] * several]]
        rows[0] += [_figures(column, done) for column in columns]
        for run in runs if len(runs) > 1 else ():
            link = f'<a href="#{anchors[run]}">seed {run.config["seed"]}</a>'
            rows.append([_cell(f"{link}{_notes([run])}"), _cell(), *(_figures(column, [run]) for column in columns)])
        bodies.append("</tr><tr hidden>".join(map("".join, rows)))
    body = "".join(f"<tbody><tr>{rows}</tr></tbody>" for rows in bodies)
    return f'<div class="overview"><table><thead><tr>{"".join(head)}</tr></thead>{body}</table></div>'


def _shared(column: _Column, group: Group) -> str | None:
    """What all runs have in this column, if they agree; empty if none has anything."""
    values = {column.value(run) or "" for run in group.runs}
    return values.pop() if len(values) == 1 else None


def _head(title: str, hint: str) -> str:
    return f'<th scope="col" title="{html.escape(hint)}"><button type="button">{title}</button></th>'


def _cell(shown: str = "", key: str = "", number: bool = False) -> str:
    kind = ' class="number"' if number else ""
    return f'<td{kind} data-value="{html.escape(key)}">{shown}</td>'


def _figures(column: _Column, runs: Sequence[Run]) -> str:
    shown, key = column.of(runs)
    return _cell(html.escape(shown), key, number=column not in _WORDS)


def _seeds(label: str, done: int, runs: int) -> str:
    """How many seeds the figures are of; a button, if there are several."""
    told = str(runs) if done == runs else f"{done} of {runs}"
    if runs > 1:
        told = f'<button type="button" aria-expanded="false" title="each seed of {html.escape(label)}">{told}</button>'
    return _cell(told, str(done), number=True)


def _notes(runs: Sequence[Run]) -> str:
    """What is not as it should be."""
    edited, begun = sum(run.edited for run in runs), [run.status for run in runs if run.status != "finished"]
    notes = begun if len(runs) == 1 else [f"{len(begun)} unfinished"] * bool(begun)
    text = f" <small>{html.escape(', '.join(notes))}</small>" if notes else ""
    if edited:
        which = "edited" if len(runs) == 1 else f"{edited} edited"
        text += f' <strong title="not the configuration or the rounds that were published">{which}</strong>'
    return text
