"""How fast the rotation of DRIVE and EDEN runs on one core: coordinates a second, there and back.

    python benchmarks/rotation.py

Sizes: layers of the paper's networks, round numbers, and a power of two, where both windows cover everything and the
work is largest. Target: 50 M coordinates a second. Time is that of the thread: neighbours on the machine count less.
"""

import statistics
import time

import torch

from fedbat.rotation import rotate, rotate_back

SIZES = [9 * 2**13, 9 * 2**15, 1_000_000, 1 << 20, 2_500_000, 10_000_000]
REPEATS = 9


def main() -> None:
    torch.set_num_threads(1)
    seed = torch.tensor(1)
    print(f"{'d':>12} {'rotate':>10} {'back':>10}   1e6 coordinates/s, one thread, medians of {REPEATS}")
    for d in SIZES:
        x = torch.randn(d)
        rates = [
            d / 1e6 / statistics.median(seconds(turn, x, seed) for _ in range(REPEATS))
            for turn in (rotate, rotate_back)
        ]
        print(f"{d:12,d} {rates[0]:10.1f} {rates[1]:10.1f}")


def seconds(turn, x, seed):
    start = time.thread_time()
    turn(x, seed)
    return time.thread_time() - start


if __name__ == "__main__":
    main()
