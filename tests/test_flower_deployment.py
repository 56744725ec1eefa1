"""A real deployment on loopback: TLS, node authentication, a node that dies and comes back, one that sends garbage."""

import copy
import datetime
import ipaddress
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg

from fedbat import layout_of, make_method
from fedbat.flower import Compressed
from fedbat.flower.records import tensors_of_record
from fedbat.following import message_bytes
from fedbat.storage import load_tensors
from tests.flower_processes import Processes, accuracies, free_port, train_metrics
from tests.flower_world import World, key_of

QUICKSTART = Path(__file__).parent.parent / "examples" / "flower-quickstart"
SETTINGS = {
    "method": "ef-signsgd",
    "fraction-train": 1.0,
    "min-nodes": 3,
    "local-epochs": 1,
    "batch-size": 64,
    "lr": 0.05,
    "seed": 0,
}
ROUNDS = 3  # and one more after the server has come back
TIMEOUT = 120  # seconds; twice what the SuperLink takes to notice that a node is dead
SPOILED = """
def spoil(msg, context, call_next):
    config = msg.content.config_records.get("config", {})
    reply = call_next(msg, context)
    if config.get("server-round") == context.node_config.get("garbage-in-round", 0):
        reply.content["arrays"] = ArrayRecord(
            {name: Array(a.dtype, a.shape, a.stype, bytes(len(a.data))) for name, a in reply.content["arrays"].items()}
        )
    return reply


app = ClientApp(mods=[spoil, fedbat_mod])
"""


def copy_of_the_app(folder):
    """The quickstart, with a mod that spoils what a node sends in the round its config names."""
    shutil.copytree(QUICKSTART, folder)
    path = folder / "quickstart" / "client_app.py"
    source, plain = path.read_text(), "app = ClientApp(mods=[fedbat_mod])\n"
    assert plain in source
    path.write_text(source.replace(plain, SPOILED).replace("import ArrayRecord", "import Array, ArrayRecord"))
    return folder


def write_certificates(folder):
    """ca.crt, and server.crt with server.key for loopback."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test CA")])

    def certificate(name, key, *extensions):
        builder = x509.CertificateBuilder(ca_name, name, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    server_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    places = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    (folder / "ca.crt").write_bytes(certificate(ca_name, ca_key, x509.BasicConstraints(ca=True, path_length=None)))
    (folder / "server.crt").write_bytes(certificate(server_name, server_key, x509.SubjectAlternativeName(places)))
    (folder / "server.key").write_bytes(
        server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )


def write_node_key(path):
    """As ssh-keygen -t ecdsa -b 384 does."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    )
    path.with_suffix(".pub").write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )


def without_network(client_app, model):
    """The same training in one process: node 2 is not there in round 2, and node 1's reply is lost in round 3."""
    world = World(client_app, 3, node_config={"num-partitions": 3}, run_config=SETTINGS)
    node_2 = next(context for node, context in world.contexts.items() if world.partition(node) == 2)
    replies, remembered = {1: 0, 2: 0}, []

    def lost_in_round_3(reply):
        replies[1] += 1
        return [] if replies[1] == 3 else [reply]

    def dead_in_round_2(reply):
        replies[2] += 1
        if replies[2] == 2:
            node_2.state = remembered[0]
            return []
        remembered.append(copy.deepcopy(node_2.state))
        return [reply]

    world.spoil = {1: lost_in_round_3, 2: dead_in_round_2}
    inside = FedAvg(fraction_evaluate=0.0, min_available_nodes=3)
    strategy = Compressed(inside, make_method(SETTINGS["method"]), model, seed=SETTINGS["seed"])
    result = strategy.start(world, ArrayRecord(model.state_dict()), ROUNDS + 1)
    states = {world.partition(node): context.state for node, context in world.contexts.items()}
    return tensors_of_record(result.arrays), {
        k: tensors_of_record(state[key_of(state, "memory")]) for k, state in states.items()
    }


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_operators_page_shows_options_that_are_tried_here():
    page = (QUICKSTART.parent.parent / "docs" / "deploy.md").read_text()
    commands = "".join(re.findall(r"```bash\n(.*?)```", page, re.S))
    here = Path(__file__).read_text() + (Path(__file__).parent / "flower_processes.py").read_text()
    missing = [option for option in re.findall(r" (--[a-z-]+)", commands) if f'"{option}"' not in here]
    assert not missing
    assert set(re.findall(r"([a-z-]+)=", re.search(r"-c '(.*?)'", page)[1])) <= {
        *SETTINGS, "num-server-rounds", "timeout", "checkpoint", "down",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.deployment
def test_every_round_is_aggregated_whatever_a_node_does(tmp_path, monkeypatch):
    app = copy_of_the_app(tmp_path / "app")
    with Processes(tmp_path / "here") as processes:
        folder = processes.folder
        write_certificates(folder)
        port = free_port()
        superlink = [
            "--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key",
            "--enable-supernode-auth", "--database", "superlink.db", "--disable-runtime-dependency-installation",
        ]  # fmt: skip
        address = processes.superlink(*superlink, port=port)
        processes.connect("prod", address, **{"root-certificates": folder / "ca.crt"})

        def supernode(k):
            config = f'partition-id={k} num-partitions=3 fedbat-memory="{folder}/memory"'
            config += " garbage-in-round=3" if k == 1 else ""
            processes.start(
                f"node-{k}", "flower-supernode", "--superlink", address, "--root-certificates", "ca.crt",
                "--auth-supernode-private-key", f"node-{k}", "--port", free_port(), "--node-config", config,
            )  # fmt: skip

        for k in range(4):
            write_node_key(folder / f"node-{k}")
        for k in range(3):
            processes.run("flwr", "supernode", "register", f"node-{k}.pub", "prod")
        for k in range(4):
            supernode(k)
        for k in range(3):
            processes.wait_for(f"node-{k}", "SuperNode ID")
        processes.wait_for("node-3", "Failed to activate SuperNode")  # nobody registered its key
        processes.end("node-3")

        def run(name, num_rounds):
            config = {"num-server-rounds": num_rounds, "timeout": TIMEOUT, "checkpoint": f"{folder}/checkpoint"}
            overrides = " ".join(f"{key}={json.dumps(value)}" for key, value in (SETTINGS | config).items())
            processes.start(name, "flwr", "run", app, "prod", "--stream", "-c", overrides)

        run("run", ROUNDS)
        processes.wait_for("node-2", "Receiving: train message", times=3, timeout=240)  # a hello, round 1, round 2
        processes.end("node-2")
        (memory,) = (folder / "memory").glob("*-memory-2.safetensors")
        before = memory.read_bytes()
        supernode(2)
        processes.wait_for("node-2", "Failed to activate SuperNode")  # the SuperLink still waits for its heartbeat
        processes.end("node-2")
        processes.wait_for("run", f"[ROUND 3/{ROUNDS}]", timeout=240)
        supernode(2)
        processes.wait_for("node-2", "SuperNode ID", times=2)
        assert memory.read_bytes() == before
        processes.wait_for("run", "ServerApp-side Evaluate Metrics", timeout=240)
        processes.end("superlink")
        processes.superlink(*superlink, port=port)
        run("next-run", ROUNDS + 1)
        processes.wait_for("next-run", "ServerApp-side Evaluate Metrics", timeout=240)
        rounds = [train_metrics(processes.log(name)) for name in ("run", "next-run")]
        accuracy = accuracies(processes.log("next-run"))[-1]

    assert [[round_["fedbat-uploads"] for round_ in part] for part in rounds] == [[3, 2, 2], [3]]
    assert [round_["fedbat-missing"] for round_ in rounds[0]] == [0, 1, 0]
    assert [round_.get("fedbat-dropped-malformed", 0) for round_ in rounds[0]] == [0, 0, 1]
    assert 0.5 < accuracy < 0.9
    monkeypatch.syspath_prepend(QUICKSTART)
    from quickstart.client_app import app as client_app
    from quickstart.task import new_model

    weights, memories = without_network(client_app, new_model(SETTINGS["seed"]))
    (last,) = (folder / "checkpoint").glob("*.safetensors")
    found = {name.removeprefix("model/"): tensor for name, tensor in load_tensors(last).items()}
    assert same(found, weights)
    for k, expected in memories.items():  # node 2 went on with what it remembered before it died
        (memory,) = (folder / "memory").glob(f"*-memory-{k}.safetensors")
        assert same(load_tensors(memory), expected)


@pytest.mark.slow
@pytest.mark.deployment
def test_nodes_follow_a_public_model_through_restarts(tmp_path, monkeypatch):
    """Two nodes, one with a disk; the other is killed and comes back with nothing; then the server does."""
    settings = SETTINGS | {"method": "fedbat", "down": "follow", "min-nodes": 2, "timeout": TIMEOUT}
    monkeypatch.syspath_prepend(QUICKSTART)
    from quickstart.client_app import app as client_app
    from quickstart.task import new_model

    with Processes(tmp_path / "here") as processes:
        address = processes.superlink("--insecure", "--disable-runtime-dependency-installation")
        processes.connect("link", address, insecure=True)

        def supernode(k):
            config = f"partition-id={k} num-partitions=2" + (f' fedbat-memory="{processes.folder}/0"' if k == 0 else "")
            processes.start(
                f"node-{k}", "flower-supernode", "--insecure", "--superlink", address, "--port", free_port(),
                "--node-config", config,
            )  # fmt: skip

        def run(name, num_rounds):
            config = {"num-server-rounds": num_rounds, "checkpoint": f"{processes.folder}/checkpoint"}
            overrides = " ".join(f"{key}={json.dumps(value)}" for key, value in (settings | config).items())
            processes.start(name, "flwr", "run", QUICKSTART, "link", "--stream", "-c", overrides)

        for k in (0, 1):
            supernode(k)
            processes.wait_for(f"node-{k}", "SuperNode ID")
        run("run", 4)
        processes.wait_for("node-1", "Sent successfully", times=2, timeout=120)  # a hello, round 1
        processes.end("node-1")
        supernode(1)
        processes.wait_for("run", "ServerApp-side Evaluate Metrics", timeout=240)
        run("next-run", 5)
        processes.wait_for("next-run", "ServerApp-side Evaluate Metrics", timeout=120)
        rounds = [train_metrics(processes.log(name)) for name in ("run", "next-run")]

    model = new_model(settings["seed"])
    one, whole = (message_bytes(layout_of(model), missed) for missed in (1, None))
    missing = [round_["fedbat-missing"] for round_ in rounds[0]]
    back = missing.index(0, 1)  # the first round with its second self
    assert missing[0] == 0 and sum(missing) <= 1 and back < 4
    down = [round_["fedbat-downlink-bytes"] for round_ in rounds[0]]
    assert down[0] == 2 * whole and down[back] == one + whole and all(x == 2 * one for x in down[back + 1 :])
    assert [round_["fedbat-downlink-bytes"] for round_ in rounds[1]] == [one + whole]  # only node 0 has a disk
    assert [round_["fedbat-uploads"] for round_ in rounds[1]] == [2]

    world = World(client_app, 2, node_config={"num-partitions": 2}, run_config=settings)
    to_come = [*missing, 0]

    def lost(reply):
        trained = bool(reply.content.array_records)  # else it asks for what it missed
        return [] if trained and to_come.pop(0) else [reply]

    world.spoil[1] = lost
    strategy = Compressed(
        FedAvg(fraction_evaluate=0.0), make_method("fedbat"), model, seed=settings["seed"], down=settings["down"]
    )
    result = strategy.start(world, ArrayRecord(model.state_dict()), 5)
    (last,) = (processes.folder / "checkpoint").glob("*.safetensors")
    found = {
        name.removeprefix("model/"): tensor for name, tensor in load_tensors(last).items() if name.startswith("model/")
    }
    assert same(found, tensors_of_record(result.arrays))
