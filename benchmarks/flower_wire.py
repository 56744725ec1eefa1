"""Bytes on Flower's wire, per client and round: a counting TCP proxy between a SuperNode and its SuperLink.

    python -m benchmarks.flower_wire [--rounds 4]

One SuperNode, one training step a round, no evaluation on clients, no TLS. All that passes the proxy counts: models,
updates, and Flower's signalling (polls and heartbeats included, so slower machines have a little more of it). The first
round is told apart, because the app itself and fedbat's question who is there travel in it.
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
METHODS = {"stock": "FedAvg, float32", "fedbat": "FedBAT"}


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


def measure(model: str, method: str, num_rounds: int) -> list[Bytes]:
    """Of each round; a fresh network for each measurement, so that none pays for another's."""
    with network() as (processes, counter):
        config = {"model": model, "method": method, "num-server-rounds": num_rounds, "stamps": counter.stamps}
        overrides = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        processes.run("flwr", "run", APP, "link", "--stream", "-c", overrides, timeout=600)
        assert len(counter.notes) == num_rounds + 1, counter.notes  # before the first and after each
        return [Bytes(after.up - before.up, after.down - before.down) for before, after in pairwise(counter.notes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    print(f"bytes per client and round, mean of rounds 2 to {options.rounds} (in brackets: round 1)")
    print(f"{'':10} {'':16} {'up':>24} {'down':>26}")
    for model in ("cnn", "resnet10"):
        found = {}
        for method, title in METHODS.items():
            first, *rest = measure(model, method, options.rounds)
            found[method] = up, down = Bytes(*(round(mean(column)) for column in zip(*rest, strict=True)))
            print(f"{model:10} {title:16} {up:12,d} ({first.up:10,d}) {down:12,d} ({first.down:10,d})")
        ratios = [a / b for a, b in zip(found["stock"], found["fedbat"], strict=True)]
        print(f"{model:10} {'ratio':16} {ratios[0]:12.1f} {'':12} {ratios[1]:12.2f}")


if __name__ == "__main__":
    main()
