"""What the terminal's table says of runs that are made up round by round."""

import dataclasses

from fedbat.cli.table import print_table
from fedbat.engine.sequential import SequentialEngine
from fedbat.experiment import Experiment, prepare
from fedbat.simulation import initial_state, rounds
from tests.test_report import SMALL


def made(method, *accuracies):
    """A run whose rounds have these accuracies."""
    federation = prepare(Experiment(method=method, **SMALL))
    round_, _ = next(rounds(federation, SequentialEngine(federation), initial_state(federation)))
    return federation, [dataclasses.replace(round_, index=i, accuracy=a) for i, a in enumerate(accuracies)]


def test_runs_that_end_at_chance_are_named_with_what_to_try(capsys):
    learned, lost = made("fedavg", 0.1, 0.5), made("fedbat", 0.5, 0.099)
    print_table([learned])
    assert "chance" not in capsys.readouterr().out
    print_table([lost])
    advice = "accuracy ends at chance (10 %): try more rounds, or a lower --lr"
    assert advice in capsys.readouterr().out.splitlines()
    print_table([learned, lost])
    assert f"fedbat: {advice}" in capsys.readouterr().out.splitlines()
