"""Which quantizer of the model's way down is best at two and three bits, by its error and by training with it.

    python benchmarks/quantizers.py [--rounds 15] [--widths 2,3]

Every quantizer has 2^bits levels and one scale for each output channel. FedBAT trains Fashion-MNIST's CNN with ten of a
hundred clients a round and two local epochs; `error` is the squared error of the last snapshot over the model's square,
`received` and `true` are the accuracies of what clients get and of the server's model, means of the last five rounds.
"""

import argparse
import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbat.channels import Channels, levels_of
from fedbat.downlink import DOWNLINKS, Downlink, Public
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


def normal_rms(rows: Tensor, width: int) -> Tensor:
    scales = rows.square().mean(1).sqrt()
    return scales[:, None] * nearest(rows, scales, levels_of(width, rows.device))


def ours(rows: Tensor, width: int) -> Tensor:
    return Channels.of(rows, width).unpack().view_as(rows)


def fitted(rows: Tensor, width: int) -> Tensor:
    """Lloyd's own levels for this tensor, which would have to be sent, too."""
    scales = rows.square().mean(1).sqrt().clamp(min=1e-30)
    unit, levels = rows / scales[:, None], levels_of(width, rows.device)
    for _ in range(30):
        codes = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2).view(-1)
        sums = torch.zeros(len(levels)).index_add_(0, codes, unit.reshape(-1))
        levels = torch.where((count := codes.bincount(minlength=len(levels))) > 0, sums / count.clamp(min=1), levels)
    chosen = nearest(unit, torch.ones(len(rows)), levels)
    return best_scales(rows, chosen)[:, None] * chosen


QUANTIZERS: dict[str, Quantizer] = {
    "even levels, largest weight fits": even_max,
    "even levels, best scale": even_best,
    "Lloyd-Max for the normal law, rms": normal_rms,
    "the same, best scale (fedbat)": ours,
    "Lloyd-Max fitted to each tensor": fitted,
}


@dataclass
class Trial(Downlink):
    """A snapshot by any quantizer."""

    quantize: Quantizer
    width: int
    error: float = 0.0

    def publish(self, layout: Layout, w: Tensors, before: Public | None, version: int) -> Public:
        sent, lost, size = dict(w), 0.0, 0.0
        for entry in layout.compressed:
            rows = w[entry.name].reshape(len(w[entry.name]), -1)
            found = self.quantize(rows, self.width)
            lost, size = lost + float((rows - found).square().sum()), size + float(rows.square().sum())
            sent[entry.name] = found.view(entry.shape)
        self.error = lost / size
        return Public(sent, 0)


def train(name: str, num: int) -> tuple[float, float]:
    """Accuracies of what clients get and of the true model, in percent."""
    federation = prepare(Experiment(method="fedbat", dataset="fmnist", epochs=2, rounds=num, down=name))
    with closing(make_engine(federation, "cpu")) as engine:
        found = [round_ for round_, _ in rounds(federation, engine, initial_state(federation))][-5:]
    received = statistics.mean((r.received or r).accuracy for r in found)
    return 100 * received, 100 * statistics.mean(r.accuracy for r in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--widths", default="2,3")
    options = parser.parse_args()
    print(f"fmnist, iid, {options.rounds} rounds{'error':>29} received   true", flush=True)
    print("32 bits{:>42}   {:8.1f} {:6.1f}".format("", *train("32", options.rounds)), flush=True)
    for width in map(int, options.widths.split(",")):
        for name, quantize in QUANTIZERS.items():
            trial = DOWNLINKS["trial"] = Trial(quantize, width)
            received, true = train("trial", options.rounds)
            print(f"{width} bits  {name:36s}{trial.error:10.3f} {received:8.1f} {true:6.1f}", flush=True)


if __name__ == "__main__":
    main()
