"""What to run, as one frozen value, and everything it stands for: data, split, model, method."""

import copy
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedbat.averaging import check_average
from fedbat.data import (
    MIN_VIRTUAL_SAMPLES,
    SETTINGS,
    Dataset,
    Split,
    check_dataset,
    load_dataset,
    partition,
    scheme_of,
    spec_of,
    users_of,
)
from fedbat.downlink import FULL, check_downlink
from fedbat.errors import ConfigError
from fedbat.layout import Layout, layout_of
from fedbat.method import Method
from fedbat.methods import make_method, method_kind
from fedbat.models import INITS, build_model, default_init, default_rounds
from fedbat.settings import check_types, show
from fedbat.streams import stream, stream_seed


def num_batches(num_samples: int, batch_size: int) -> int:
    """The number of batches in one pass over the samples; the last may be short."""
    return -(-num_samples // batch_size)


WEIGHTS: dict[str, Callable[[int, int], int]] = {  # a client's weight, from its number of samples and the batch size
    "samples": lambda num_samples, batch_size: num_samples,  # p_k of the paper
    "batches": num_batches,  # the authors' code
}


_LEAST = dict.fromkeys(("clients", "per_round", "rounds", "epochs", "batch_size", "labels", "samples"), 1)
_LEAST |= {"seed": 0, "partition_seed": 0}


def _flag(name: str) -> str:
    """The name as a command-line option, since most experiments come from there."""
    return f"--{name.replace('_', '-')}"


def variant_of(method: str, settings: Mapping[str, Any], down: str, told: Collection[str] = ()) -> str:
    """The method, its settings that are `told` or not at their defaults, and the downlink unless it is the default."""
    try:
        usual = method_kind(method)().settings()
    except ConfigError:  # a recorded method that is not known here
        usual = {}
    differs = {name for name, value in settings.items() if json.dumps(value) != json.dumps(usual.get(name))}
    shown = {name: value for name, value in settings.items() if name in differs or name in told}
    shown |= {} if down == FULL else {"down": down}
    return " ".join([method, *(f"{name}={show(value)}" for name, value in shown.items())])


@dataclass(frozen=True)
class Experiment:
    """One federated run; the defaults are the paper's (Section 5.1). None means the data set's own default."""

    method: str = "fedbat"
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method; text once resolved
    dataset: str = "fmnist-mini"
    partition: str = "iid"
    clients: int = 100  # N
    per_round: int = 10  # K
    rounds: int | None = None  # R
    epochs: int = 10  # E
    batch_size: int = 64
    lr: float = 0.1
    model: str | None = None
    init: str | None = None  # of its weights
    weights: str = "samples"  # what a client's weight in the mean is based on
    beta: float | None = None  # of Dirichlet partitions; beta, labels and samples stay None if unused
    labels: int | None = None  # per client, in the label partitions
    samples: int | None = None  # per client, in virtual populations
    down: str = FULL  # the downlink: bits per weight, or following
    average: float = 0.0  # weight of the past in the averaged model; 0: none is kept
    seed: int = 0
    partition_seed: int = 1234

    def __post_init__(self) -> None:
        check_types(self, _flag)
        check_dataset(self.dataset)
        scheme_of(self.partition)
        for name, choices in (("weights", WEIGHTS), ("init", INITS)):
            if (choice := getattr(self, name)) is not None and choice not in choices:
                raise ConfigError(f"{_flag(name)} is {choice!r}; choose from {', '.join(choices)}")
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{_flag(name)} is {value}, expected a whole number of at least {least}")
        if self.per_round > self.clients:
            raise ConfigError(
                f"--per-round is {self.per_round} but there are only {self.clients} clients; "
                "lower --per-round or raise --clients"
            )
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"--lr is {self.lr}, expected a positive number; the paper uses 0.1")
        if self.partition_seed >= 2**32:
            raise ConfigError(f"--partition-seed is {self.partition_seed}, expected a whole number below 2^32")
        for name in SETTINGS:
            value, users = getattr(self, name), users_of(name)
            if value is not None and self.partition not in users:  # whoever gives one means another partition
                raise ConfigError(
                    f"{_flag(name)} is {value}, but --partition {self.partition} does not use it; "
                    f"drop it, or choose {' or '.join(users)}"
                )
        check_downlink(self.down)
        check_average(self.average)
        make_method(self.method, self.settings)

    @property
    def variant(self) -> str:
        """The name that people are shown: fedbat rho=4 down=4."""
        return variant_of(self.method, make_method(self.method, self.settings).settings(), self.down)

    @property
    def split(self) -> str:
        """The partition with its settings, as shown to people."""
        return split_of(vars(self))

    @property
    def num_rounds(self) -> int:
        """`rounds` of an experiment whose defaults are written out."""
        assert self.rounds is not None
        return self.rounds

    def resolved(self) -> "Experiment":
        """The same experiment with every default written out."""
        spec, scheme = spec_of(self.dataset), scheme_of(self.partition)
        model = self.model or spec.default_model

        def used(setting: str, default: float) -> Any:
            """The given value or the default; None if the partition does not use this setting."""
            if setting not in scheme.uses:
                return None
            given = getattr(self, setting)
            return default if given is None else given

        return dataclasses.replace(
            self,
            settings={name: show(value) for name, value in self.settings.items()},
            model=model,
            init=self.init or default_init(model),
            rounds=self.rounds or default_rounds(model),
            beta=used("beta", spec.default_beta),
            labels=used("labels", spec.default_labels),
            samples=used("samples", MIN_VIRTUAL_SAMPLES),
        )


def variants_of(experiments: Sequence[Experiment]) -> list[str]:
    """The variants of runs shown together: what varies among the runs of a method is told of each, also defaults."""
    found = [(one, make_method(one.method, one.settings).settings()) for one in experiments]

    def varied(method: str) -> set[str]:
        first, *others = [settings for one, settings in found if one.method == method]
        return {name for name, value in first.items() if any(show(other[name]) != show(value) for other in others)}

    return [variant_of(one.method, settings, one.down, varied(one.method)) for one, settings in found]


def split_of(config: Mapping[str, Any]) -> str:
    """How a configuration splits the data, such as `dirichlet beta=0.3` or `labels=3`."""
    kind = config["partition"]
    used = {name: config[name] for name in SETTINGS if config.get(name) is not None}
    named = [f"{name}={show(value)}" for name, value in used.items()]
    return " ".join(named if kind in used else [kind, *named])


@dataclass(frozen=True, eq=False)
class Federation:
    """An experiment with its data loaded and split: everything an engine needs, and nothing it may change."""

    experiment: Experiment
    method: Method
    data: Dataset
    split: Split  # sample indices per client
    model: nn.Module  # holds the initial weights
    layout: Layout

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(p.numel() for p in self.model.parameters())

    def sampled(self, round_: int) -> list[int]:
        """The clients of a round, ascending: uniform without replacement."""
        rng = stream(self.experiment.seed, "clients", round_)
        chosen = rng.choice(self.experiment.clients, self.experiment.per_round, replace=False)
        return sorted(int(client) for client in chosen)

    def num_steps(self, client: int) -> int:
        """tau: the optimizer steps of a client in one round."""
        return self.experiment.epochs * num_batches(len(self.split[client]), self.experiment.batch_size)

    def weight(self, num_samples: int) -> int:
        """The weight in the mean of a client with `num_samples` samples."""
        return WEIGHTS[self.experiment.weights](num_samples, self.experiment.batch_size)


def prepare(experiment: Experiment, data_root: Path | None = None, data: Dataset | None = None) -> Federation:
    """Load the data (unless given), split, build; every mistake in an experiment shows before any file is written."""
    experiment = experiment.resolved()
    assert experiment.model is not None
    data = data or load_dataset(experiment.dataset, data_root)
    if data.spec.name != spec_of(experiment.dataset).name:
        raise ConfigError(
            f"data is {data.spec.name!r}, but dataset is {experiment.dataset!r}, which the record would name; give the "
            "experiment the name of its data, for your own that of the function that makes them"
        )
    split = partition(
        experiment.partition,
        data.y_train.numpy(),
        experiment.clients,
        experiment.partition_seed,
        experiment.beta,
        experiment.labels,
        experiment.samples,
    )
    seed = stream_seed(experiment.seed, "init")
    model = build_model(experiment.model, data.spec.shape, data.spec.num_classes, seed, experiment.init)
    _check_model(model, experiment.model, data)
    method = make_method(experiment.method, experiment.settings)
    return Federation(experiment, method, data, split, model, layout_of(model))


def _check_model(model: nn.Module, name: str, data: Dataset) -> None:
    """Refuse a model that does not turn two images into two rows of class scores."""
    expected = (2, data.spec.num_classes)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = tuple(copy.deepcopy(model).eval()(torch.zeros(2, *data.spec.shape)).shape)
    except Exception as error:
        raise ConfigError(f"--model {name} cannot take images of shape {data.spec.shape}: {error}") from error
    if found != expected:
        raise ConfigError(f"--model {name} gives {found} for two images, expected {expected}: a score for each class")
