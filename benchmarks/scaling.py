"""How time and peak memory grow with the clients there are (N), those of a round (K), and the parameters (d).

    python benchmarks/scaling.py [SECTION ...] [--engine sequential] [--method fedbat]

Sections: population (N), per-round (K), size (d), memories (error feedback on a budget), and huge, which is 100 M
parameters, two rounds of four clients, 20 steps each; without names all but the last, in about a minute on two cores.
Every line is a process of its own, its peak memory that of the process (and, apart, of its largest worker process).
All on virtual clients of 64 samples of fmnist-mini, one local step each if not said otherwise; the model is an MLP with
a square hidden layer. "start" is from the first import to the first round, "round" the fastest of them.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

SMALL, MIB = 32, 2**20  # hidden width; bytes
SECTIONS = {
    "population": [{"clients": n} for n in (100, 10_000, 1_000_000)],
    "per-round": [{"clients": 10_000, "per_round": k} for k in (10, 100, 1000)],
    "size": [{"clients": 100, "per_round": 4, "width": width} for width in (100, 760, 2800)],
    "memories": [
        {"clients": 10_000, "per_round": 100, "width": 760, "method": "ef-signsgd", "budget": budget}
        for budget in (None, 50e6)
    ],
    "huge": [{"clients": 100, "per_round": 4, "epochs": 20, "width": 9610, "rounds": 2}],
}


def __getattr__(name):
    """`scaling:mlp_100`: a model of that width, by the name under which an experiment asks for it."""
    if not name.startswith("mlp_"):
        raise AttributeError(name)
    width = int(name.removeprefix("mlp_"))

    def mlp(shape, num_classes):
        from torch import nn

        inputs = shape[0] * shape[1] * shape[2]
        return nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, num_classes),
        )  # fmt: skip

    return mlp


def measure(clients, per_round=10, rounds=3, epochs=1, width=SMALL, method="fedbat", engine="sequential", budget=None):
    """One run in this process."""
    start = time.perf_counter()
    from contextlib import closing

    from fedbat.engine import make_engine
    from fedbat.experiment import Experiment, prepare
    from fedbat.memories import Memories
    from fedbat.simulation import initial_state
    from fedbat.simulation import rounds as run

    federation = prepare(
        Experiment(
            method=method,
            partition="virtual",
            clients=clients,
            per_round=per_round,
            rounds=rounds,
            epochs=epochs,
            lr=0.01,
            model=f"scaling:mlp_{width}",
        )
    )
    memories = Memories(budget=float("inf") if budget is None else budget)
    with closing(make_engine(federation, engine)) as engine_:
        before = initial_state(federation, memories)
        begun = time.perf_counter()
        found = []
        for round_, state in run(federation, engine_, before):
            found.append(round_)
            memories = state.memories
    peak, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "d": sum(p.numel() for p in federation.model.parameters()),
        "start": begun - start,
        "round": min(round_.seconds for round_ in found),
        "peak": peak * unit,
        "child": child * unit,
        "took_part": len({client for round_ in found for client in round_.clients}),
        "remembered": sum(t.nbytes for t in next(iter(memories.values()), {}).values()) * len(memories),
    }


def show(section, options):
    print(f"{section}\n{'N':>10} {'K':>6} {'d':>12}  {'start, s':>9} {'round, s':>9} {'peak, MiB':>10}", flush=True)
    for sizes in SECTIONS[section]:
        asked = {"method": options.method, "engine": options.engine} | sizes
        command = [sys.executable, __file__, "--one", json.dumps(asked)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        note = [f"{asked['method']}, {found['took_part']} clients took part"]
        if found["remembered"]:
            budget = "all in RAM" if asked["budget"] is None else f"{asked['budget'] / MIB:.0f} MiB in RAM"
            note.append(f"they remember {found['remembered'] / MIB:.0f} MiB, {budget}")
        if found["child"]:
            note.append(f"largest worker {found['child'] / MIB:.0f} MiB")
        print(
            f"{asked['clients']:>10,} {asked.get('per_round', 10):>6,} {found['d']:>12,}  {found['start']:>9.2f} "
            f"{found['round']:>9.2f} {found['peak'] / MIB:>10,.0f}  {'; '.join(note)}",
            flush=True,
        )
    print()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--engine", default="sequential")
    parser.add_argument("--method", default="fedbat")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(**json.loads(options.one))))
        return
    if unknown := set(options.sections) - SECTIONS.keys():
        parser.error(f"unknown section {', '.join(unknown)}; choose from {', '.join(SECTIONS)}")
    for section in options.sections or [name for name in SECTIONS if name != "huge"]:
        show(section, options)


if __name__ == "__main__":
    main()
