"""What one client's upload costs: encoding, decoding and adding 10 M parameters, on one core.

    python benchmarks/wire.py [--parameters 10000000]

Encoding is everything from the trained update to bytes, the noise included. Target for one-bit methods: 60 ms in all.
A plain addition of as many float32 runs beside it.
"""

import argparse
import statistics
import time

import torch
from torch import nn

from fedbat import METHODS, Aggregator, Payload, layout_of, make_method
from fedbat.layout import tensors_of
from fedbat.method import Local
from fedbat.streams import UniformNoise


def clock(function, *args):
    start = time.perf_counter()
    result = function(*args)
    return result, 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    width = round((options.parameters / 4) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    layout = layout_of(model)
    w = tensors_of(model, layout)
    numel = sum(tensor.numel() for tensor in w.values())
    update = {name: 1e-3 * torch.randn_like(tensor) for name, tensor in w.items()}
    target = torch.zeros(numel)
    plain = statistics.median(clock(target.add_, torch.randn(numel))[1] for _ in range(options.repeats))
    print(f"{numel / 1e6:.1f} M parameters, one thread, medians of {options.repeats}; ms")
    print(f"{'':14} {'encode':>8} {'decode':>8} {'add':>8} {'total':>8}   bytes   1e9 parameters/s decoded and added")
    variants = [(name, {}) for name in sorted(METHODS)] + [("fedbat", {"bits": "2"}), ("fedbat", {"bits": "4"})]
    for name, settings in variants:
        method, times, size = make_method(name, settings), [], 0
        label = " ".join([name, *(f"{key}={value}" for key, value in settings.items())])
        aggregator = Aggregator(method, layout, w)
        for seed in range(options.repeats):
            noise = UniformNoise(seed, "noise")

            def encode(method=method, noise=noise):
                local = Local(update, method.learnables(w))
                local.fixed = method.prepare(w, local)
                parts, _ = method.encode(w, local, {}, noise)
                return Payload(layout, parts, {}).to_bytes()

            raw, encoding = clock(encode)
            payload, decoding = clock(Payload.from_bytes, raw, layout)
            _, adding = clock(aggregator.add, payload, 600)
            times.append((encoding, decoding, adding))
            size = len(raw)
        encoding, decoding, adding = (statistics.median(column) for column in zip(*times, strict=True))
        rate = numel / (decoding + adding) / 1e6
        total = encoding + decoding + adding
        print(f"{label:14} {encoding:8.1f} {decoding:8.1f} {adding:8.1f} {total:8.1f} {size:10,d}   {rate:.2f}")
    print(f"{'float32 add':14} {'':8} {'':8} {plain:8.1f}")


if __name__ == "__main__":
    main()
