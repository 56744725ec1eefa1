"""What is on the page, and where: the links at its top, the headings, and what the runs of each group share."""

import html
from collections.abc import Sequence

from fedbat.experiment import split_of
from fedbat.report.names import as_text, not_default
from fedbat.report.runs import Group
from fedbat.report.table import computed_on
from fedbat.units import count

_FACTS = {
    "clients": "{} client{s}",
    "per_round": "{} a round",
    "rounds": "{} round{s}",
    "epochs": "{} local epoch{s}",
    "batch_size": "batch size {}",
    "lr": "learning rate {}",
    "model": "model {}",
}


def summary(groups: Sequence[Group]) -> str:
    """How much there is, as HTML."""
    runs = [run for group in groups for run in group.runs]
    counts = (
        count(len({run.config["method"] for run in runs}), "method"),
        count(len({run.config["dataset"] for run in runs}), "data set"),
        count(len({split_of(run.config) for run in runs}), "kind") + " of split",
        count(sum(len(run.record.lines) for run in runs), "round"),
    )
    edited = sum(run.edited for run in runs)
    warning = f" <strong>{count(edited, 'run')} edited after publication.</strong>" if edited else ""
    return f"{count(len(runs), 'run')}: {', '.join(counts)}.{warning}"


def headings(groups: Sequence[Group]) -> list[str]:
    """The data set and the split of each group, with whatever else tells it from the others."""
    return [f"{group.config['dataset']}, {split}" for group, split in zip(groups, _splits(groups), strict=True)]


def contents(groups: Sequence[Group]) -> str:
    """Links to the groups, a line for each data set, if there are several."""
    if len(groups) == 1:
        return ""
    lines: dict[str, list[str]] = {}
    for number, (group, split) in enumerate(zip(groups, _splits(groups), strict=True)):
        runs = f"<small>{count(len(group.runs), 'run')}</small>"
        link = f'<a href="#group-{number}">{html.escape(split)}</a> {runs}'
        lines.setdefault(group.config["dataset"], []).append(link)
    rows = (
        f"<dt>{html.escape(dataset)}</dt><dd><ul>{''.join(f'<li>{link}</li>' for link in links)}</ul></dd>"
        for dataset, links in lines.items()
    )
    return f'<nav aria-label="contents"><dl>{"".join(rows)}</dl></nav>'


def facts(group: Group) -> str:
    """What all runs of a group share, or most of them; labels name the exceptions."""
    values = {name: group.usual.get(name, as_text(group.config.get(name))) for name in _FACTS}
    told = [
        text.format(values[name], s="" if values[name] == "1" else "s")
        for name, text in _FACTS.items()
        if name not in group.varying or name in group.usual
    ]
    told += not_default(group.runs, group.usual, ("seed", *_FACTS, *set(group.varying).difference(group.usual)))
    seed = [] if "seed" in group.varying else [f"seed {group.config['seed']}"]
    but = "; a run's name tells where it differs" if group.usual else ""
    return ", ".join([*told, *seed, *computed_on(group)]) + but


def _splits(groups: Sequence[Group]) -> list[str]:
    """The split of each group; its clients and its seed where groups differ in nothing else."""
    configs = [group.config for group in groups]
    forms = {"clients": "{:,} clients", "partition_seed": "split seed {}"}
    told = {name: form for name, form in forms.items() if len({config[name] for config in configs}) > 1}
    return [
        ", ".join([split_of(config), *(form.format(config[name]) for name, form in told.items())]) for config in configs
    ]
