"""How long recorded rounds take on a link, by a plain model: the server waits for everyone, then does its own work.

    round = max over its clients (latency + 8 down / rate + computing + 8 up / rate) + server

down, up   the client's bytes in that round, as packed; a Mbit is 10^6 bits
latency    there and back, once per round
computing  a given number of seconds, or the client's measured ones times a factor
server     measured seconds to unpack and add the uploads and to pack what goes down next, if computing is measured, too

What records do not tell by client (older ones, and seconds on a GPU that trains clients side by side) is divided
equally: bytes round by round, seconds by the median round. A lost client is not waited for. All clients download and
upload at once, each at its own rate; the server's connection is assumed to be fast enough.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fedbat.errors import ConfigError
from fedbat.figures import Lines, held_accuracy

_FORM = "up=10,down=50 (Mbit/s), with latency=40 (ms) and compute=10x (or seconds) if wanted, or a .csv file of rates"
_NAMES = ("up", "down", "latency", "compute", "file")
_COLUMNS = ["client", "up", "down", "latency"]


@dataclass(frozen=True)
class Rate:
    """A client's connection."""

    up: float  # Mbit/s
    down: float
    latency: float = 0.0  # ms, round trip

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name):g}, expected more than 0 Mbit/s")
        if not 0 <= self.latency < math.inf:
            raise ConfigError(f"latency is {self.latency:g}, expected milliseconds, 0 or more")


@dataclass(frozen=True)
class Link:
    """How clients are connected, and how fast they compute."""

    usual: Rate | None = None
    clients: Mapping[int, Rate] = field(default_factory=dict)  # clients with rates of their own
    seconds: float | None = None  # computing time of every client in a round
    factor: float | None = None  # or: what each client's measured computing time is multiplied by; None: by 1

    def __post_init__(self) -> None:
        for value in (self.factor or 0.0, self.seconds or 0.0):
            if not 0 <= value < math.inf:
                raise ConfigError(f"compute is {value:g}, expected 0 or more: 10x as measured, or 30 seconds")

    def rate(self, client: int) -> Rate:
        """The connection of one client."""
        found = self.clients.get(client, self.usual)
        if found is None:
            raise ConfigError(f"--link has no rates for client {client}; add its line, or up= and down= for all others")
        return found

    def check(self, num_clients: int) -> None:
        """Refuse a link on which one of the clients has no rate."""
        for client in range(num_clients):
            self.rate(client)

    @property
    def rates(self) -> str:
        """The connections, in words."""
        parts = [f"{len(self.clients)} clients with rates of their own"] if self.clients else []
        if self.usual:
            rest = "all others " if self.clients else ""
            parts.append(f"{rest}{self.usual.up:g} Mbit/s up, {self.usual.down:g} down")
            parts += [f"latency {self.usual.latency:g} ms"] if self.usual.latency else []
        return ", ".join(parts)

    @property
    def computing(self) -> str:
        """How long clients compute, in words."""
        if self.seconds is not None:
            return f"computing {self.seconds:g} s a round"
        return "computing as measured" if self.factor is None else f"computing {self.factor:g}x as measured"

    def __str__(self) -> str:
        return f"{self.rates}, {self.computing}"


class Times(NamedTuple):
    """The seconds of one round: those of its slowest client, then the server's."""

    latency: float
    down: float
    computing: float
    up: float
    server: float = 0.0

    @property
    def total(self) -> float:
        """The seconds of the whole round."""
        return sum(self)


class Costs(NamedTuple):
    """What it took to reach a target accuracy."""

    rounds: int
    num_bytes: int  # up and down, of all clients together
    seconds: float


def price(lines: Lines, link: Link) -> list[Times]:
    """The time that each round takes on the link."""
    usual = _share_of_the_median_round(lines)
    return [_round(line, link, usual) for line in lines]


def median_computing(lines: Lines) -> float:
    """The median of the seconds that clients computed in a round."""
    usual = _share_of_the_median_round(lines)
    works = [work for line in lines for work in _finished(line)]
    return float(median(usual if work.seconds is None else work.seconds for work in works))


def _share_of_the_median_round(lines: Lines) -> float:
    return float(median((line["seconds"] - line.get("server_seconds", 0.0)) / len(_finished(line)) for line in lines))


def costs_to(target: float, lines: Lines, times: Sequence[Times]) -> Costs | None:
    """The costs until clients first hold a model of the target accuracy; None if they never do."""
    reached = next((n for n, line in enumerate(lines, start=1) if held_accuracy(line) >= target), None)
    if reached is None:
        return None
    num_bytes = sum(line["uplink_bytes"] + line["downlink_bytes"] for line in lines[:reached])
    return Costs(reached, num_bytes, sum(round_.total for round_ in times[:reached]))


def mean_times(times: Sequence[Times]) -> Times:
    """The mean round."""
    return Times(*(sum(column) / len(times) for column in zip(*times, strict=True)))


def is_measured(lines: Lines) -> bool:
    """Whether computing times were measured client by client."""
    return all(work.seconds is not None for line in lines for work in _finished(line))


def _round(line: Mapping[str, Any], link: Link, usual_seconds: float) -> Times:
    waits = []
    for work in _finished(line):
        rate, seconds = link.rate(work.client), link.seconds
        if seconds is None:
            measured = usual_seconds if work.seconds is None else work.seconds
            seconds = measured if link.factor is None else link.factor * measured
        down, up = transfer_seconds(work.down, rate.down), transfer_seconds(work.up, rate.up)
        waits.append(Times(rate.latency / 1e3, down, seconds, up))
    slowest = max(waits, key=lambda wait: wait.total)
    return slowest if link.seconds is not None else slowest._replace(server=line.get("server_seconds", 0.0))


def transfer_seconds(num_bytes: float, rate: float) -> float:
    """The seconds it takes to send `num_bytes` at `rate` Mbit/s."""
    return 8 * num_bytes / (1e6 * rate)


class _Work(NamedTuple):
    """One client's share of a round."""

    client: int
    down: float  # bytes
    up: float
    seconds: float | None


def _finished(line: Mapping[str, Any]) -> list[_Work]:
    """The work of the clients that were not lost."""
    clients, lost = line["clients"], line.get("lost") or {}
    num = len(clients)
    down = line.get("downloads") or [line["downlink_bytes"] / num] * num
    up = line.get("uploads") or [line["uplink_bytes"] / (num - len(lost))] * num
    seconds = line.get("client_seconds") or [None] * num
    found = (_Work(*each) for each in zip(clients, down, up, seconds, strict=True))
    return [work for work in found if str(work.client) not in lost]


def usual_target(bests: Iterable[float]) -> float:
    """A target that every run reaches: 99 % of the lowest of their best accuracies."""
    return 0.99 * min(bests)


def parse_link(text: str) -> Link:
    """Read "up=10,down=50,latency=40,compute=10x". With a file of per-client rates, up and down are for all others."""
    given: dict[str, str] = {}
    for item in (item.strip() for item in text.split(",")):
        name, value = item.split("=", 1) if "=" in item else ("file", item)
        if name not in _NAMES or name in given or not value:
            raise ConfigError(f"--link {text}: got {item!r}, expected {_FORM}")
        given[name] = value
    file = given.pop("file", None)
    computing = given.pop("compute", None)
    try:
        numbers = {name: float(value) for name, value in given.items()}
        latency = numbers.get("latency", 0.0)
        clients = _read_rates(Path(file), latency) if file else {}
        usual = None if clients and numbers.keys() <= {"latency"} else Rate(**numbers)
        if computing is None:
            return Link(usual, clients)
        if computing.endswith("x"):
            return Link(usual, clients, factor=float(computing[:-1]))
        return Link(usual, clients, seconds=float(computing.removesuffix("s")))
    except (ValueError, TypeError):  # not a number; only one of up and down
        raise ConfigError(f"--link is {text!r}, expected {_FORM}") from None


def _read_rates(path: Path, latency: float) -> dict[int, Rate]:
    """Read a CSV file with one line per client; `latency` is for files without such a column."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # as spreadsheets write it
            lines = csv.reader(file, skipinitialspace=True)
            (_, names), *rows = [(lines.line_num, row) for row in lines if row] or [(1, [])]
    except (OSError, UnicodeDecodeError, csv.Error):
        raise ConfigError(f"--link: {str(path)!r} is no file that can be read; expected {_FORM}") from None
    if names not in (_COLUMNS, _COLUMNS[:3]):
        raise ConfigError(f"--link {path} begins with {','.join(names)!r}, expected client,up,down or also latency")
    rates: dict[int, Rate] = {}
    for number, row in rows:
        try:
            client, rate = int(row[0]), Rate(*map(float, row[1:3]), *(map(float, row[3:]) if names[3:] else [latency]))
            if len(row) != len(names) or client in rates:
                raise ValueError
        except (ValueError, TypeError, IndexError, ConfigError):
            expected = f"a client that had no line yet, then numbers above 0 for {', '.join(names[1:])}"
            raise ConfigError(f"--link {path}, line {number}: got {','.join(row)!r}, expected {expected}") from None
        rates[client] = rate
    return rates
