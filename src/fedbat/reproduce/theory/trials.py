"""A trial: one toy federation, trained in many independent runs side by side, and what is measured in them.

Every trial gives numbers at some times that a theorem bounds by c / time^rate, except for terms that fall faster.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fedbat.errors import ConfigError
from fedbat.reproduce.theory import theorems, toys
from fedbat.reproduce.theory.theorems import Constants, Floats
from fedbat.reproduce.theory.toys import Compression, Round


@dataclass(frozen=True)
class Trial:
    """Everything that decides what is computed; phi = 0 and alpha = ||m||_inf, as in the theorems."""

    problem: str  # of PROBLEMS
    compress: str  # of toys.COMPRESSIONS
    clients: int  # N
    sampled: int  # K
    dimension: int
    mu: float  # 0 where nothing is convex
    smoothness: float  # L
    spread: float  # of the clients' optima
    sigma: float
    start: float  # value of every coordinate of the first model
    tau: int
    first: int  # step from which on is measured ...
    steps: int  # ... to this one, the last,
    points: int  # at so many times, evenly spaced in log t
    seeds: int  # independent runs
    seed: int = 0  # of the toy and of all noise

    def __post_init__(self) -> None:
        for name, known in (("problem", [*PROBLEMS]), ("compress", [*toys.COMPRESSIONS])):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, choose from {', '.join(known)}")
        if not (self.clients >= 2 and 1 <= self.sampled <= self.clients):
            raise ConfigError(f"sampled is {self.sampled} of {self.clients} clients, expected 1 to all of at least two")
        if not self.tau <= self.first <= self.steps:
            raise ConfigError(
                f"first is {self.first} with tau {self.tau} and steps {self.steps}, expected it between them"
            )
        if self.seeds < 2 or self.points < 2:
            raise ConfigError(f"seeds is {self.seeds} and points {self.points}, expected at least 2, to have a spread")

    @property
    def compression(self) -> Compression:
        """How updates are compressed."""
        return toys.COMPRESSIONS[self.compress]

    @property
    def rounds(self) -> list[int]:
        """The rounds after which something is measured."""
        ends = np.geomspace(self.first, self.steps, self.points) / self.tau
        return sorted(set(ends.round().astype(int).tolist()))

    def generator(self, *path: int) -> torch.Generator:
        """The random generator of a part of the noise."""
        (state,) = np.random.SeedSequence([self.seed, *path]).generate_state(1)
        return torch.Generator().manual_seed(int(state))

    def train(self, toy: toys.Toy, learning_rate: toys.LearningRate, num_rounds: int) -> Iterator[Round]:
        """Train all runs at once."""
        return toys.train(
            toy,
            learning_rate,
            w=torch.full((self.seeds, self.dimension), self.start, dtype=torch.float64),
            tau=self.tau,
            num_rounds=num_rounds,
            num_sampled=self.sampled,
            rng=self.generator(num_rounds, self.sampled),
            compress=self.compression.apply,
        )


class Measured(NamedTuple):
    """What was measured in a trial's runs."""

    times: Floats  # gamma + t, or T
    values: Floats  # [times, seeds]: the gap, or the mean squared gradient
    constants: dict[str, float]  # measured, or known about the toy: all that the bound needs


class Problem(Protocol):
    """A kind of toy, and the theorem it is for."""

    title: str
    what: str  # what is measured, the error
    time: str  # what it is measured against
    rate: float  # the exponent at which it falls
    decades: float  # the part at the end of the run from which slopes are taken

    def __init__(self, trial: Trial) -> None: ...

    def measure(self) -> Measured:
        """Train and measure."""

    def bound(self, times: Floats, constants: Mapping[str, float]) -> Floats:
        """The theorem's bound."""


class StronglyConvex:
    """Theorems 1 and 2: eta_t = 2 / (mu (gamma + t)); the gap along the run."""

    title = "Theorems 1 and 2: strongly convex"
    what, time = "F(w) − F*", "γ + t"
    rate, decades = 1.0, 1.3  # from where the start is forgotten

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.toy = toys.some_quadratics(
            trial.generator(),
            num_clients=trial.clients,
            d=trial.dimension,
            spread=trial.spread,
            mu=trial.mu,
            smoothness=trial.smoothness,
            sigma=trial.sigma,
        )
        self.gamma = max(8 * trial.smoothness / trial.mu, trial.tau) - 1

    def learning_rate(self, t: int) -> float:
        """The learning rate of step t = 1, 2, ..."""
        return 2 / (self.trial.mu * (self.gamma + t))

    def measure(self) -> Measured:
        """Train and measure the gap; training starts with w_1, so round r ends with w_(1 + r tau)."""
        trial, toy, ends, gaps, constants = self.trial, self.toy, self.trial.rounds, [], Constants()
        for index, round_ in enumerate(trial.train(toy, self.learning_rate, ends[-1])):
            if index + 1 in ends:
                gaps.append(toy.gap(round_.w))
            if _watched(index):
                constants = constants.after(round_, trial.compression)
        known = {
            "heterogeneity": toy.heterogeneity,
            "start2": float(((trial.start - toy.optimum) ** 2).sum()),
            "limit": theorems.limit(
                toy, tau=trial.tau, num_sampled=trial.sampled, rng=trial.generator(1), compression=trial.compression
            ),
        }
        return Measured(
            self.gamma + 1 + trial.tau * np.array(ends, dtype=float),
            torch.stack(gaps).numpy(),
            constants._asdict() | known,
        )

    def bound(self, times: Floats, constants: Mapping[str, float]) -> Floats:
        """The bound of Theorem 2."""
        trial = self.trial
        b = theorems.b_of_theorem_2(
            trial.clients,
            trial.sampled,
            smoothness=trial.smoothness,
            sigma2=trial.sigma**2,
            tau=trial.tau,
            **{name: constants[name] for name in ("heterogeneity", "g2", "q2")},
        )
        return theorems.bound_of_theorem_2(
            times, b=b, mu=trial.mu, smoothness=trial.smoothness, gamma=self.gamma, start2=constants["start2"]
        )


class NonConvex:
    """Theorem 3: eta = 1 / (L sqrt(T)); the mean squared gradient over whole runs of different lengths T."""

    title = "Theorem 3: not convex"
    what, time = "the mean of ||∇F(w)||² over the run", "T, the steps of the run"
    rate, decades = 0.5, math.inf  # whole runs forget nothing

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.toy = toys.some_ripples(
            trial.generator(),
            num_clients=trial.clients,
            d=trial.dimension,
            spread=trial.spread,
            smoothness=trial.smoothness,
            sigma=trial.sigma,
        )

    def learning_rate(self, horizon: float) -> toys.LearningRate:
        """The learning rate, which is the same in all steps."""
        eta = 1 / (self.trial.smoothness * math.sqrt(horizon))
        return lambda t: eta

    def measure(self) -> Measured:
        """Train and measure squared gradients; `curvature` is the least seen, negative where F is not convex."""
        trial, toy, constants, curvature = self.trial, self.toy, Constants(), math.inf
        times = trial.tau * np.array(trial.rounds, dtype=float)
        squares = []
        for num_rounds, horizon in zip(trial.rounds, times.tolist(), strict=True):
            total = torch.zeros(trial.seeds, dtype=torch.float64)
            for index, round_ in enumerate(trial.train(toy, self.learning_rate(horizon), num_rounds)):
                path = round_.start + torch.stack([m.mean(1) for m in round_.updates[:-1]])  # w_bar of the tau steps
                total += (toy.gradient(path[..., None, :]).mean(-2) ** 2).sum((0, -1))
                curvature = min(curvature, float(toy.curvature(path[0]).min()))
                if _watched(index):
                    constants = constants.after(round_, trial.compression)
            squares.append(total / horizon)
        first = torch.full((trial.dimension,), trial.start, dtype=torch.float64)
        known = {"descent": float(toy.value(first)) - toy.mean_minimum(), "curvature": curvature}
        return Measured(times, torch.stack(squares).numpy(), constants._asdict() | known)

    def bound(self, times: Floats, constants: Mapping[str, float]) -> Floats:
        """The bound of Theorem 3."""
        trial = self.trial
        return theorems.bound_of_theorem_3(
            times,
            trial.clients,
            trial.sampled,
            smoothness=trial.smoothness,
            sigma2=trial.sigma**2,
            tau=trial.tau,
            **{name: constants[name] for name in ("descent", "g2", "q2")},
        )


PROBLEMS: dict[str, type[Problem]] = {"quadratics": StronglyConvex, "ripples": NonConvex}


def read_trials(place: str, entries: list[dict[str, Any]]) -> tuple[Trial, ...]:
    """The trials of an experiment file: every combination of the values that an entry lists."""
    names = [field.name for field in fields(Trial)]
    found = []
    for entry in entries:
        if unknown := entry.keys() - set(names):
            raise ConfigError(f"{place}: no trial has {', '.join(sorted(unknown))}; it has {', '.join(names)}")
        choices = [value if isinstance(value, list) else [value] for value in entry.values()]
        for values in itertools.product(*choices):
            try:
                found.append(Trial(**dict(zip(entry, values, strict=True))))
            except (TypeError, ConfigError) as error:
                raise ConfigError(f"{place}: {error}") from None
    return tuple(found)


def _watched(index: int) -> bool:
    """Whether a round is used to measure constants: the first 20, where gradients are largest, then one in 20."""
    return index < 20 or index % 20 == 0
