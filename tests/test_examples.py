"""The examples run as their READMEs say; what the migration costs in lines and saves in bytes."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from flwr.app import ArrayRecord

from tests.flower_processes import Processes, accuracies, train_metrics

EXAMPLES = Path(__file__).parent.parent / "examples"
DIFF = EXAMPLES / "flower-migrate" / "one-bit.diff"


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    """One SuperLink for all runs: `flwr run APP local` would leave its own running."""
    with Processes(tmp_path_factory.mktemp("flower") / "here") as processes:
        processes.connect("local", processes.superlink("--insecure", "--simulation"), insecure=True)

        def run(app, num_clients, *options):
            resources = f"num-supernodes={num_clients} client-resources-num-cpus=1 init-args-num-cpus=2"
            command = ["flwr", "run", app, "local", "--stream", "--federation-config", resources, *options]
            log = processes.run(*command, timeout=240)
            assert "Traceback" not in log, log
            return log

        yield run


@pytest.mark.slow
def test_quickstart_learns_at_one_bit(simulation):
    log = simulation(EXAMPLES / "flower-quickstart", 10, "-c", "num-server-rounds=3")
    metrics, found = train_metrics(log), accuracies(log)
    assert [round_["fedbat-uploads"] for round_ in metrics] == 3 * [5]
    assert all(round_["fedbat-downlink-bytes"] > 25 * round_["fedbat-uplink-bytes"] for round_ in metrics)
    assert len(found) == 4 and found[0] < 0.2 and 0.4 < found[-1] < 0.9


@pytest.mark.slow
def test_migration_shrinks_the_uplink(simulation, tmp_path, monkeypatch):
    apps = [shutil.copytree(EXAMPLES / "flower-migrate", tmp_path / name) for name in ("before", "after")]
    subprocess.run(["git", "apply", "one-bit.diff"], cwd=apps[1], check=True)
    with ThreadPoolExecutor() as pool:
        before, after = pool.map(lambda app: simulation(app, 4), apps)
    monkeypatch.syspath_prepend(apps[0])
    from migrate.task import Net

    plain = sum(len(array.data) for array in ArrayRecord(Net().state_dict()).values())  # what stock FedAvg sends
    assert "fedbat-uplink-bytes" not in before
    assert len(train_metrics(after)) == 3
    for round_ in train_metrics(after):
        assert round_["fedbat-uploads"] == 2 and round_["fedbat-uplink-bytes"] * 24 < 2 * plain
    assert all(0.4 < accuracies(log)[-1] < 0.9 for log in (before, after))


def test_at_most_five_lines_change_on_the_clients_side():
    files = dict.fromkeys(("client_app.py", "task.py", "server_app.py"), 0)
    for line in DIFF.read_text().splitlines():
        if line.startswith("+++"):
            name = Path(line).name
        elif line.startswith("+"):
            files[name] += 1
    assert 0 < files["client_app.py"] + files["task.py"] <= 5
    assert list(files) == ["client_app.py", "task.py", "server_app.py"]


def test_the_page_for_developers_shows_the_diff():
    assert f"```diff\n{DIFF.read_text()}```" in (EXAMPLES.parent / "docs" / "flower.md").read_text()
