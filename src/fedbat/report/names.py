"""What runs are called: their variant, and whatever else is needed to tell one from the others."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from fedbat.data import DATASETS
from fedbat.experiment import Experiment
from fedbat.models import default_init
from fedbat.settings import show

if TYPE_CHECKING:
    from fedbat.report.runs import Run

SPLIT = ("dataset", "partition", "beta", "labels", "samples", "clients", "partition_seed")  # which client holds what
NEVER_IN_A_LABEL = (*SPLIT, "method", "settings", "down")  # the last three are in the variant
_DEFAULTS = {field.name: field.default for field in fields(Experiment)}


def varying(runs: Sequence["Run"]) -> tuple[str, ...]:
    """The fields in which runs with the same clients differ, apart from the method and its settings."""
    names = dict.fromkeys(name for run in runs for name in run.config if name not in NEVER_IN_A_LABEL)
    return tuple(name for name in names if len({as_text(run.config.get(name)) for run in runs}) > 1)


def usual_values(runs: Sequence["Run"], names: Iterable[str]) -> dict[str, str]:
    """What most runs have in these fields, as text; of values that are equally frequent the default, or else none."""
    found = {}
    for name in names:
        often = Counter(_value(run.config, name) for run in runs)
        first = [value for value, number in often.items() if number == max(often.values())]
        default = _default(runs[0].config, name)
        if len(first) == 1 or default in first:
            found[name] = first[0] if len(first) == 1 else default
    return found


def label_of(run: "Run", names: Iterable[str], usual: Mapping[str, str]) -> str:
    """The variant, and the values of these fields where they are not as usual."""
    told = [name for name in names if _value(run.config, name) != usual.get(name)]
    return " ".join([run.variant, *(f"{flag(name)}={as_text(run.config.get(name))}" for name in told)])


def not_default(runs: Sequence["Run"], usual: Mapping[str, str], without: Container[str]) -> list[str]:
    """What all runs, or those that are called by their variant alone, have beyond the defaults: weights=batches."""
    first = runs[0].config
    names = [name for name in first if name not in without and name not in NEVER_IN_A_LABEL]
    values = {name: usual[name] if name in usual else _value(first, name) for name in names}
    return [f"{flag(name)}={value}" for name, value in values.items() if value != _default(first, name)]


def as_text(value: Any) -> str:
    """A value of a configuration as on the command line."""
    return "none" if value is None else show(value)


def flag(name: str) -> str:
    """A configuration's name as its option is spelled."""
    return name.replace("_", "-")


def _value(config: Mapping[str, Any], name: str) -> str:
    """A field's value as text; weights that start as their model always does count as equal."""
    value = config.get(name)
    return "usual" if name == "init" and value == default_init(str(config["model"])) else as_text(value)


def _default(config: Mapping[str, Any], name: str) -> str:
    """A field's default as text."""
    if name == "init":
        return "usual"
    if name == "model" and config["dataset"] in DATASETS:
        return DATASETS[config["dataset"]].default_model
    return as_text(_DEFAULTS.get(name))
