"""Flower's commands as processes of this machine, with a home of their own; all are ended at the end of the `with`."""

import ast
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Processes:
    """Commands run in `folder`, which has a log of each and is Flower's home."""

    def __init__(self, folder):
        self.folder, self.running = Path(folder), {}
        home, commands = self.folder / "flwr", Path(sys.executable).parent
        home.mkdir(parents=True)
        self.environment = os.environ | QUIET | {"FLWR_HOME": str(home), "PATH": f"{commands}:{os.environ['PATH']}"}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in list(self.running):
            self.end(name)

    def start(self, name, *command):
        """Each is the leader of a group, to which the processes it starts belong."""
        with (self.folder / f"{name}.log").open("a") as log:
            self.running[name] = subprocess.Popen(
                list(map(str, command)), cwd=self.folder, env=self.environment,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def end(self, name):
        """At once, with all it started."""
        process = self.running.pop(name)
        with suppress(ProcessLookupError):  # nobody is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, name, text, timeout=60, times=1):
        """Until the log of a process says `text` that often."""
        deadline = time.monotonic() + timeout
        while self.log(name).count(text) < times:
            assert time.monotonic() < deadline, f"{name} did not say {text!r} within {timeout} s:\n{self.log(name)}"
            assert self.running[name].poll() is None, f"{name} ended before it said {text!r}:\n{self.log(name)}"
            time.sleep(0.2)

    def run(self, *command, timeout=60):
        """A command that ends; what it said."""
        done = subprocess.run(
            list(map(str, command)), cwd=self.folder, env=self.environment, timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def superlink(self, *options, port=None):
        """Started and ready; its address."""
        port = port or free_port()
        self.start("superlink", "flower-superlink", "--host", "127.0.0.1", "--port", port, *options)
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return f"127.0.0.1:{port}"
            except OSError:
                assert time.monotonic() < deadline, self.log("superlink")
                time.sleep(0.2)

    def connect(self, name, address, **settings):
        """Let `flwr run APP name` find a SuperLink."""
        settings = {"address": address} | settings
        lines = [
            f"{key} = {str(value).lower() if value is True else repr(str(value))}" for key, value in settings.items()
        ]
        with (self.folder / "flwr" / "config.toml").open("a") as config:
            config.write("\n".join([f"[superlink.{name}]", *lines, ""]))


def train_metrics(log):
    """Of each round, as the server logged them."""
    return [ast.literal_eval(found) for found in re.findall(r"Aggregated MetricRecord: (\{.*?\})", log)]


def accuracies(log):
    """Of the global model, before the first round and after each."""
    return [float(found) for found in re.findall(r": \{'accuracy': ([\d.e-]+)", log)]
