"""What rounds take on a link: the laws of its prices, one example by hand, and what cannot be read."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbat.engine import SequentialEngine
from fedbat.errors import ConfigError
from fedbat.experiment import Experiment, prepare
from fedbat.link import Link, Rate, Times, costs_to, is_measured, mean_times, parse_link, price, usual_target
from fedbat.report import find_runs, group_runs, price_group
from fedbat.run import run_recorded

ROOT = Path(__file__).parent.parent
NOTHING = Link(Rate(math.inf, math.inf))


def line(clients, downloads, uploads, seconds, server=0.0, accuracy=0.5, lost=()):
    """A round as rounds.jsonl has it."""
    return {
        "accuracy": accuracy,
        "clients": clients,
        "lost": {str(client): "gone" for client in lost},
        "downloads": downloads,
        "uploads": uploads,
        "client_seconds": seconds,
        "server_seconds": server,
        "uplink_bytes": sum(uploads),
        "downlink_bytes": sum(downloads),
        "seconds": sum(second or 0.0 for second in seconds) + server,
    }


sizes = st.integers(0, 10**9)
spans = st.floats(0, 1e4)
rates = st.floats(1e-3, 1e5)
clients = st.lists(st.tuples(sizes, sizes, spans), min_size=1, max_size=5)


def round_of(found, server=0.0):
    down, up, seconds = map(list, zip(*found, strict=True))
    return line(list(range(len(found))), down, up, seconds, server)


def test_an_example_by_hand():
    """Client 0: 0.1 + 8 * 2.5 / 20 + 3 + 8 * 0.5 / 4 = 5.1 s; client 7, with its own: 0.02 + 2 + 1.5 + 2 = 5.52 s."""
    slow = Link(Rate(up=4, down=20, latency=100), {7: Rate(up=2, down=10, latency=20)}, factor=1.5)
    found = line([0, 7], [2_500_000, 2_500_000], [500_000, 500_000], [2.0, 1.0], server=0.25)
    assert price([found], slow) == [pytest.approx(Times(0.02, 2.0, 1.5, 2.0, 0.25))]
    assert price([found], dataclasses.replace(slow, clients={}))[0].total == pytest.approx(5.1 + 0.25)
    given = price([found], dataclasses.replace(slow, seconds=10.0))[0]
    assert given.computing == 10.0 and given.server == 0.0  # what was measured on other machines does not count


@given(clients, rates, rates, st.floats(1, 100), st.floats(0, 1e3))
def test_a_faster_link_is_never_slower(found, up, down, times, latency):
    def seconds(*rate):
        return price([round_of(found)], Link(Rate(*rate)))[0].total

    base = seconds(up, down, latency)
    assert seconds(times * up, down, latency) <= base >= seconds(up, times * down, latency)
    assert seconds(up, down, latency + 1) >= base


@given(clients, spans)
def test_without_waiting_for_bytes_only_computing_is_left(found, server):
    (times,) = price([round_of(found, server)], NOTHING)
    assert times == Times(0.0, 0.0, max(second for _, _, second in found), 0.0, server)


@given(clients, rates, rates)
def test_twice_the_bytes_take_twice_as_long(found, up, down):
    link = Link(Rate(up, down), seconds=0.0)
    (once,) = price([round_of(found)], link)
    (twice,) = price([round_of([(2 * d, 2 * u, s) for d, u, s in found])], link)
    assert twice.total == pytest.approx(2 * once.total)


@given(clients, rates, rates, spans)
def test_a_round_is_its_slowest_client_and_the_server(found, up, down, server):
    link = Link(Rate(up, down, latency=30))
    alone = [price([round_of([one])], link)[0].total for one in found]
    assert price([round_of(found, server)], link)[0].total == pytest.approx(max(alone) + server)


def test_whoever_is_lost_is_not_waited_for():
    found = line([3, 5], [10**6, 10**9], [10**6, 0], [1.0, None], lost=[5])
    assert price([found], Link(Rate(8, 8))) == [Times(0.0, 1.0, 1.0, 1.0, 0.0)] and is_measured([found])


def test_what_a_record_does_not_tell_apart_is_shared_equally():
    """Bytes round by round; seconds by the median round, as the first may be spent on getting ready."""
    known = ("accuracy", "clients", "uplink_bytes", "downlink_bytes", "seconds")
    whole = [line([0, 1], [10**6] * 2, [10**6] * 2, [s, s]) for s in (90.0, 1.0, 2.0)]
    old = [{key: found[key] for key in known} for found in whole]
    assert price(old, Link(Rate(8, 8))) == [Times(0.0, 1.0, 2.0, 1.0, 0.0)] * 3
    assert is_measured(whole) and not is_measured(old)
    silent = [found | {"client_seconds": [None, None]} for found in whole]  # as clients side by side on a GPU leave it
    assert price(silent, Link(Rate(8, 8))) == price(old, Link(Rate(8, 8)))


def test_the_target_is_reached_when_clients_hold_a_model_that_does():
    lines = [
        line([0], [3], [1], [1.0], accuracy=a) | {"received": {"accuracy": b}} for a, b in ((0.9, 0.2), (0.3, 0.8))
    ]
    assert costs_to(0.8, lines, price(lines, NOTHING)) == (2, 8, 2.0)


def test_costs_are_those_up_to_the_first_round_that_reaches_the_target():
    lines = [line([0], [3], [1], [1.0], accuracy=a) for a in (0.2, 0.6, 0.5, 0.9)]
    times = price(lines, NOTHING)
    assert costs_to(0.6, lines, times) == (2, 8, 2.0) and costs_to(0.61, lines, times) == (4, 16, 4.0)
    assert costs_to(0.91, lines, times) is None
    assert usual_target([0.9, 0.6]) == pytest.approx(0.594) and mean_times(times) == times[0]


def test_what_is_recorded_is_what_was_sent_and_measured(tmp_path):
    federation = prepare(Experiment(clients=8, per_round=3, rounds=4, epochs=1, batch_size=100,
                                    model="tests.test_engines:tiny", down="follow"))  # fmt: skip
    run_recorded(federation, SequentialEngine(federation), tmp_path / "run")
    (group,) = group_runs(find_runs([tmp_path])[0])
    for found in group.runs[0].record.lines:
        assert sum(found["uploads"]) == found["uplink_bytes"] and sum(found["downloads"]) == found["downlink_bytes"]
        assert 0 < sum(found["client_seconds"]) + found["server_seconds"] < found["seconds"]
    assert any(len(set(found["downloads"])) > 1 for found in group.runs[0].record.lines)  # some are new, others follow
    (priced,) = price_group(group, dataclasses.replace(NOTHING, factor=1.0)).runs
    assert priced.clock.startswith("measured client by client") and priced.costs is not None
    computing = (max(found["client_seconds"]) + found["server_seconds"] for found in group.runs[0].record.lines)
    assert sum(times.total for times in priced.times) == pytest.approx(sum(computing))
    json.dumps(priced.as_json())


def test_what_is_written_is_what_is_read(tmp_path):
    assert parse_link("up=10,down=50") == Link(Rate(10, 50))
    assert parse_link("down=50, up=0.5, latency=40, compute=10x") == Link(Rate(0.5, 50, 40), factor=10)
    assert parse_link("up=inf,down=inf,compute=30") == parse_link("up=inf,down=inf,compute=30s")
    assert parse_link("up=1,down=2,compute=30").seconds == 30
    path = tmp_path / "rates.csv"
    path.write_text("client,up,down\n0,1,8\n4, 2.5, 16\n")
    assert parse_link(str(path)) == Link(None, {0: Rate(1, 8), 4: Rate(2.5, 16)})
    assert parse_link(f"{path},up=5,down=6").rate(1) == Rate(5, 6)
    everywhere = parse_link(f"{path},latency=40")
    assert everywhere == Link(None, {0: Rate(1, 8, 40), 4: Rate(2.5, 16, 40)})
    path.write_bytes("\ufeffclient,up,down\r\n0,1,8\r\n4,2.5,16\r\n\r\n".encode())  # a spreadsheet's
    assert parse_link(f"{path},latency=40") == everywhere
    path.write_text("client,up,down,latency\n0,1,8,100\n")
    link = parse_link(f"{path},compute=2x")
    assert link.rate(0) == Rate(1, 8, 100) and link.factor == 2
    with pytest.raises(ConfigError, match="no rates for client 1; add its line"):
        link.check(2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "got '', expected up=10,down=50"),
        ("up=10", "is 'up=10', expected up=10,down=50"),
        ("up=ten,down=5", "expected up=10,down=50"),
        ("up=10,down=50,speed=3", "got 'speed=3', expected up=10,down=50"),
        ("up=10,up=10,down=50", "got 'up=10', expected"),
        ("up=0,down=50", "up is 0, expected more than 0 Mbit/s"),
        ("up=nan,down=50", "up is nan"),
        ("up=10,down=-1", "down is -1"),
        ("up=1,down=1,latency=-3", "latency is -3, expected milliseconds"),
        ("up=1,down=1,compute=fast", "expected up=10,down=50"),
        ("up=1,down=1,compute=-2x", "compute is -2, expected 0 or more"),
        ("nowhere.csv", "'nowhere.csv' is no file that can be read; expected up=10"),
    ],
)
def test_what_cannot_be_read_is_told(text, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse_link(text)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("", "begins with '', expected client,up,down or also latency"),
        ("up,down\n1,2\n", "begins with 'up,down', expected"),
        ("client,up,down\n0,1\n", "line 2: got '0,1', expected a client that had no line yet"),
        ("client,up,down\n0,1,2\n0,1,2\n", "line 3: got '0,1,2', expected a client that had no line yet"),
        ("client,up,down\nzero,1,2\n", "line 2: got 'zero,1,2'"),
        ("client,up,down\n0,0,2\n", "numbers above 0 for up, down"),
        ("client,up,down\n0,1,2,3\n", "line 2: got '0,1,2,3'"),
    ],
)
def test_a_wrong_table_of_rates_is_told_with_its_line(table, sentence, tmp_path):
    (tmp_path / "rates.csv").write_text(table)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse_link(str(tmp_path / "rates.csv"))


def test_the_page_shows_what_the_command_says(fedbat_here, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "link.md").read_text()
    ((command, shown),) = re.findall(r"```\n\$ fedbat (price .*?)\n(.*?)```", page, re.S)
    assert fedbat_here(*command.split(), check=0).stdout.strip() == shown.strip()
