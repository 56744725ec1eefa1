"""Bytes on Flower's wire, per client and round: a counting TCP proxy between a SuperNode and its SuperLink.

    python -m benchmarks.flower_wire [--rounds 4] [--models cnn resnet10]

One SuperNode that takes part in every round, one training step a round, no evaluation on clients, no TLS. All that
passes the proxy counts: models, updates, and Flower's signalling (polls and heartbeats included, so slower machines
have a little more of it). The first round is told apart, because the app itself, fedbat's question who is there, and
the whole of a model that is followed travel in it. What a client costs does not depend on how many others there are,
except by following: one that takes part in every tenth round then fetches ten steps.
"""

import argparse
import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from tests.flower_processes import Processes, free_port

APP = Path(__file__).parent / "flower_wire_app"
WAYS = {  # method and bits down
    ("stock", "32"): "FedAvg, float32",
    ("fedbat", "32"): "FedBAT, 32 bits down",
    ("fedbat", "3"): "FedBAT, 3 bits down",
    ("fedbat", "2"): "FedBAT, 2 bits down",
    ("fedbat", "follow"): "FedBAT, following",
}


class Bytes(NamedTuple):
    up: int
    down: int


class Counter:
    """A TCP proxy that counts payload bytes, and a port at which the counts are noted."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target, self.passed, self.lock = target, {"up": 0, "down": 0}, threading.Lock()
        self.notes: list[Bytes] = []
        self.address = self._serve(self._pass_on)
        self.stamps = self._serve(self._note)[1]

    def _serve(self, handle) -> tuple[str, int]:
        server = socket.create_server(("127.0.0.1", 0))

        def loop() -> None:
            while True:
                threading.Thread(target=handle, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=loop, daemon=True).start()
        return server.getsockname()

    def _note(self, connection: socket.socket) -> None:
        with self.lock:
            self.notes.append(Bytes(**self.passed))
        connection.close()

    def _pass_on(self, node: socket.socket) -> None:
        link = socket.create_connection(self.target)
        threading.Thread(target=self._pump, args=(node, link, "up"), daemon=True).start()
        self._pump(link, node, "down")

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(1 << 16):
                with self.lock:
                    self.passed[way] += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # the other side has gone
            source.close()
            sink.close()


@contextmanager
def network() -> Iterator[tuple[Processes, Counter]]:
    """A SuperLink and one SuperNode behind the counter."""
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder) / "here") as processes:
        address = processes.superlink("--insecure", "--disable-runtime-dependency-installation")
        processes.connect("link", address, insecure=True)
        host, port = address.split(":")
        counter = Counter((host, int(port)))
        processes.start(
            "node", "flower-supernode", "--insecure", "--superlink", "{}:{}".format(*counter.address),
            "--port", free_port(), "--node-config", "partition-id=0 num-partitions=1",
        )  # fmt: skip
        processes.wait_for("node", "SuperNode ID")
        yield processes, counter


def measure(model: str, method: str, down: str, num_rounds: int) -> list[Bytes]:
    """Of each round; a fresh network for each measurement, so that none pays for another's."""
    with network() as (processes, counter):
        config = {"model": model, "method": method, "down": down, "num-server-rounds": num_rounds}
        config["stamps"] = counter.stamps
        overrides = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        processes.run("flwr", "run", APP, "link", "--stream", "-c", overrides, timeout=600)
        assert len(counter.notes) == num_rounds + 1, counter.notes  # before the first and after each
        return [Bytes(after.up - before.up, after.down - before.down) for before, after in pairwise(counter.notes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet10"])
    options = parser.parse_args()
    print(f"bytes per client and round, mean of rounds 2 to {options.rounds} (in brackets: round 1)")
    print(f"{'':31}{'up':>12} {'':12} {'down':>12} {'':14} {'both':>12}   less")
    for model in options.models:
        plain = 0
        for (method, down), title in WAYS.items():
            first, *rest = measure(model, method, down, options.rounds)
            up, down_ = Bytes(*(round(mean(column)) for column in zip(*rest, strict=True)))
            plain = plain or up + down_
            print(
                f"{model:9} {title:21}{up:12,d} ({first.up:10,d}) {down_:12,d} ({first.down:10,d}) "
                f"{up + down_:12,d} {plain / (up + down_):5.1f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
