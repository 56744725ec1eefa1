"""`fedbat` as tests call it: in a process of its own, or in this one where a process would only cost its start."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FAST = ["--clients", "20", "--per-round", "2", "--epochs", "1", "--model", "tests.test_simulation:tiny"]
# Tests try the tree they stand in, whatever is installed.
ENVIRONMENT = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


class Done(NamedTuple):
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


def process(*args):
    """The command line of a process, and what it runs in."""
    return {"args": [sys.executable, "-m", "fedbat", *map(str, args)], "env": os.environ | ENVIRONMENT, "text": True}


def fedbat(*args, check=None):
    """As a person calls it."""
    done = subprocess.run(**process(*args), capture_output=True, timeout=300)
    return _checked(Done(done.returncode, done.stdout, done.stderr), check)


class Here:
    """The same in this process, for what comes before any training: mistakes, help, lists, pages from records."""

    def __init__(self, monkeypatch, capsys):
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.setenv("COLUMNS", ENVIRONMENT["COLUMNS"])
        monkeypatch.setattr("fedbat.cli.options.console._width", None)  # what the first import found
        monkeypatch.setattr(sys, "path", [*sys.path])  # `main` puts the current folder before it

    def __call__(self, *args, check=None):
        from fedbat.cli import main

        self._monkeypatch.setattr(sys, "argv", ["fedbat", *map(str, args)])
        try:
            code = main() or 0
        except SystemExit as end:
            code = end.code or 0
        return _checked(Done(code, *self._capsys.readouterr()), check)


def _checked(done, expected):
    assert expected is None or done.returncode == expected, done.stdout + done.stderr
    return done
