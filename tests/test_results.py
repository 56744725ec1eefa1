"""Committed records are whole: every round is there, and the summary is what the rounds say."""

import json
from pathlib import Path

import pytest

RECORDS = sorted((Path(__file__).parent.parent / "results").rglob("summary.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: "-".join(p.parts[-3:-1]))
def test_summary_is_what_the_rounds_say(path):
    summary = json.loads(path.read_text())
    lines = [json.loads(line) for line in (path.parent / "rounds.jsonl").read_text().splitlines()]
    accuracies = [line["accuracy"] for line in lines]
    assert summary["status"] == "finished"
    assert [line["round"] for line in lines] == list(range(1, summary["config"]["rounds"] + 1))
    assert summary["best_accuracy"] == max(accuracies) and summary["final_accuracy"] == accuracies[-1]
    assert summary["last10_accuracy"] == pytest.approx(sum(accuracies[-10:]) / 10)
    client_rounds = sum(len(line["clients"]) for line in lines)
    uplink = sum(line["uplink_bytes"] for line in lines) / client_rounds
    assert summary["uplink_bytes_per_client_round"] == pytest.approx(uplink)
