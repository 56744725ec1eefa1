"""The CUDA engine's convolutions against cuDNN's, on a GPU that has them: ten clients at a time, batch 64, bfloat16.

    python benchmarks/convolutions.py

For every convolution of ResNet-10 (64-512) and some narrower ones: microseconds of cuDNN and of engine/convs.py for ten
clients, each on a stream of its own, and what the latter are in TFLOP/s.
"""

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbat.engine.convs import _Conv, _filter_grad, _input_grad, can_fetch_tiles

CLIENTS, TIMES = 10, 10
SHAPES = [  # channels in, out, side, filter, stride
    (64, 64, 32, 3, 1), (64, 128, 32, 3, 2), (128, 128, 16, 3, 1), (128, 256, 16, 3, 2), (256, 256, 8, 3, 1),
    (256, 512, 8, 3, 2), (512, 512, 4, 3, 1), (64, 128, 32, 1, 2), (128, 256, 16, 1, 2), (256, 512, 8, 1, 2),
    (32, 32, 32, 3, 1), (32, 64, 32, 3, 2), (64, 64, 16, 3, 1), (32, 64, 14, 3, 1), (64, 128, 7, 3, 1),
]  # fmt: skip


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)


def microseconds(work: Callable[[int], object]) -> float:
    """Of one call for each client, all at a time; recorded, so that launching does not count."""
    recorded = []
    for client in range(CLIENTS):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work(client)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(TIMES):
                work(client)
            graph.capture_end()
        recorded.append((stream, graph))
    torch.cuda.synchronize()
    found = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(4):
            for stream, graph in recorded:
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / (4 * TIMES) * 1e6)
    return min(found)


@torch.no_grad()
def compared(channels: int, out: int, side: int, size: int, stride: int) -> str:
    """One convolution: forward, the gradient of its input, that of its filters."""
    padding, small = size // 2, (side - 1) // stride + 1
    data = [
        (drawn(64, out, small, small), drawn(64, channels, side, side), drawn(out, channels, size, size))
        for _ in range(CLIENTS)
    ]

    def native_grad(client: int, *wanted: bool) -> object:
        strides, paddings, mask = [stride] * 2, [padding] * 2, [*wanted, False]
        return torch.ops.aten.convolution_backward(
            *data[client], None, strides, paddings, [1, 1], False, [0, 0], 1, mask
        )

    pairs = {
        "forward": (
            lambda k: F.conv2d(*data[k][1:], stride=stride, padding=padding),
            lambda k: _Conv.apply(*data[k][1:], stride, padding),
        ),
        "input": (lambda k: native_grad(k, True, False), lambda k: _input_grad(*data[k], stride, padding)),
        "filters": (lambda k: native_grad(k, False, True), lambda k: _filter_grad(*data[k], stride, padding)),
    }
    flop, cells = 2 * 64 * small**2 * channels * out * size**2 * CLIENTS, []
    for name, (theirs, ours) in pairs.items():
        took = microseconds(ours)
        cells.append(f"{name} {microseconds(theirs):6.1f} {took:6.1f} {flop / took * 1e-6:4.0f}")
    return "   ".join(cells)


def main() -> None:
    if not torch.cuda.is_available() or not can_fetch_tiles(torch.device("cuda")):
        sys.exit("needs a GPU that fetches tiles by itself (NVIDIA Hopper or later)")
    print("in, out, side, filter, stride: microseconds of cuDNN and ours, TFLOP/s of ours")
    for shape in SHAPES:
        print("{:3} {:3} {:2} {} {}   ".format(*shape) + compared(*shape), flush=True)


if __name__ == "__main__":
    main()
