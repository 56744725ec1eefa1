"""Which quantizer of the model's way down is best at two and three bits, by its error and by training with it.

    python benchmarks/quantizers.py [--method fedavg] [--partition iid] [--rounds 20] [--widths 2,3] [--only NAME,...]

Every quantizer has 2^bits levels and one scale for each output channel. A method trains Fashion-MNIST's CNN with ten of
a hundred clients a round and two local epochs, on the CPU in bf16. `bits` are those a weight takes on average, `error`
is the sum over layers of the last snapshot's relative squared errors; `received` and `true` are the accuracies of what
clients get and of the server's model, means of the last five rounds.
"""

import argparse
import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbat.channels import Channels
from fedbat.downlink import DOWNLINKS, Downlink, Public, graded_widths
from fedbat.engine import make_engine
from fedbat.experiment import Experiment, prepare
from fedbat.layout import Layout
from fedbat.simulation import initial_state, rounds
from fedbat.streams import Tensors

Quantizer = Callable[[Tensor, int], Tensor]  # rows of weights and bits to what is sent of them


def even(width: int) -> Tensor:
    top = (1 << width) - 1
    return torch.arange(-top, top + 1, 2, dtype=torch.float32) / top


def nearest(rows: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    edges = (levels[1:] + levels[:-1]) / 2
    return levels[torch.bucketize(rows / scales.clamp(min=1e-30)[:, None], edges)]


def best_scales(rows: Tensor, chosen: Tensor) -> Tensor:
    return (rows * chosen).sum(1) / chosen.square().sum(1)


def even_max(rows: Tensor, width: int) -> Tensor:
    scales = rows.abs().amax(1)
    return scales[:, None] * nearest(rows, scales, even(width))


def even_best(rows: Tensor, width: int) -> Tensor:
    """The scale fits what is chosen by it, and the other way round, until neither moves."""
    levels, scales = even(width), rows.square().mean(1).sqrt()
    for _ in range(20):
        scales = best_scales(rows, nearest(rows, scales, levels))
    return scales[:, None] * nearest(rows, scales, levels)


def ours(rows: Tensor, width: int) -> Tensor:
    return Channels.of(rows, width).unpack().view_as(rows)


@dataclass
class Trial(Downlink):
    """A snapshot by any quantizer, with as many bits for every tensor or with more for smaller ones."""

    quantize: Quantizer
    width: int
    graded: bool = False
    bits: float = 0.0
    error: float = 0.0

    def publish(self, layout: Layout, w: Tensors, before: Public | None, version: int) -> Public:
        sent, errors, bits, numel = dict(w), 0.0, 0, 0
        graded = graded_widths(layout, self.width)
        for entry in layout.compressed:
            width = graded[entry.name] if self.graded else self.width
            rows = w[entry.name].reshape(len(w[entry.name]), -1)
            found = self.quantize(rows, width)
            errors += float((rows - found).square().sum() / rows.square().sum())
            bits, numel = bits + width * rows.numel(), numel + rows.numel()
            sent[entry.name] = found.view(entry.shape)
        self.error, self.bits = errors, bits / numel
        return Public(sent, 0)


TRIALS: dict[str, Callable[[int], Trial]] = {
    "even levels, largest weight fits": lambda width: Trial(even_max, width),
    "even levels, best scale": lambda width: Trial(even_best, width),
    "Lloyd-Max levels, best scale": lambda width: Trial(ours, width),
    "the same, graded widths (fedbat)": lambda width: Trial(ours, width, graded=True),
}


def train(down: str, options: argparse.Namespace) -> str:
    """Accuracies of what clients get and of the true model, in percent."""
    federation = prepare(
        Experiment(
            method=options.method,
            dataset="fmnist",
            partition=options.partition,
            epochs=2,
            rounds=options.rounds,
            down=down,
        )
    )
    with closing(make_engine(federation, "cpu", precision="bf16")) as engine:
        last = [round_ for round_, _ in rounds(federation, engine, initial_state(federation))][-5:]
    of_clients = [(r.received or r).accuracy for r in last]
    found = (of_clients, [r.accuracy for r in last])
    return "".join(f"{100 * statistics.mean(x):9.1f}" for x in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--partition", default="iid")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--widths", default="2,3")
    parser.add_argument("--only", help="names of trials, or parts of them", default="")
    options = parser.parse_args()
    head = f"{options.method}, fmnist {options.partition}, {options.rounds} rounds"
    print(f"{head:44s} bits  error received     true", flush=True)
    print(f"{'32 bits':56s}{train('32', options)}", flush=True)
    for width in map(int, options.widths.split(",")):
        for name, make in TRIALS.items():
            if any(part in name for part in options.only.split(",")):
                trial = DOWNLINKS["trial"] = make(width)
                scores = train("trial", options)
                print(f"{width} bits  {name:36s} {trial.bits:4.2f} {trial.error:6.3f}{scores}", flush=True)


if __name__ == "__main__":
    main()
