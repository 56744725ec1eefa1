"""Write the golden byte vectors of wire format v1 into tests/golden: `python scripts/make_golden.py`.

The vectors are a promise: they may gain members, but a vector that is there never changes (docs/wire-format.md,
"Versions"). Values come from integer arithmetic, and the expected ones are computed here in plain Python, not by the
code under test.
"""

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import torch

from fedbat.channels import Channels
from fedbat.following import Follower, Leader
from fedbat.layout import Entry, Layout
from fedbat.levels import Levels, OddLevels
from fedbat.parts import Dense, Part, Signs, Sparse
from fedbat.seeded_parts import MaskedNoise, RotatedLevels, RotatedSigns
from fedbat.wire import Payload

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"


def main(folder: Path) -> None:
    vectors = {}
    for name, context, tensors in messages():
        payload, vectors[name] = _assemble(context, tensors)
        (folder / f"{name}.bin").write_bytes(payload.to_bytes())
    lines = [f"{json.dumps(name)}: {json.dumps(vector)}" for name, vector in vectors.items()]
    (folder / "vectors.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    (folder / "following.json").write_text(json.dumps(following()) + "\n")


def messages() -> list[tuple[str, int, list[tuple[Any, ...]]]]:
    """(name, context, [(tensor's name, dtype, shape, content)]) of every vector."""
    return [
        (
            "example",
            7,
            [
                ("conv.weight", "float32", [1, 1, 3, 3], signs(9, 0.25)),
                ("conv.bias", "float32", [1], [-1.5]),
                ("bn.num_batches_tracked", "int64", [], [40]),
            ],
        ),
        ("dense", 0, [("a", "float32", [2, 3], dense(6)), ("b", "float32", [3, 5, 1], dense(15))]),
        ("signs", 1, [(f"d{d}", "float32", [1, d], signs(d, 1 / d)) for d in (1, 2, 3, 4, 5, 6, 7, 8, 9, 64, 257)]),
        ("levels", 2, [(f"b{b}", "float32", [3, 7], levels(21, b, 0.1 * b)) for b in (2, 3, 4, 5, 6, 7, 8)]),
        (
            "sparse",
            3,
            [
                ("rice-example", "float32", [4, 5], sparse(20, [3, 4, 17], [1.0, -2.0, 0.5])),
                ("empty", "float32", [4, 5], sparse(20, [], [])),
                ("all", "float32", [3, 3], sparse(9, list(range(9)), numbers(9))),
                ("first", "float32", [200, 1], sparse(200, [0], [1e-30])),
                ("last", "float32", [200, 1], sparse(200, [199], [-3e38])),
                (
                    "one-in-33",
                    "float32",
                    [33, 30],
                    sparse(990, [(33 * i + i * i % 33) for i in range(30)], numbers(30)),
                ),
            ],
        ),
        (
            "rest",
            4,
            [
                ("bool", "bool", [5], [True, False, False, True, True]),
                ("uint8", "uint8", [3], [0, 128, 255]),
                ("int8", "int8", [3], [-128, -1, 127]),
                ("int16", "int16", [2], [-32768, 258]),
                ("int32", "int32", [2, 1], [-(2**31), 16909060]),
                ("int64", "int64", [], [-(2**63)]),
                ("float16", "float16", [2], [1.5, -0.0009765625]),
                ("bfloat16", "bfloat16", [3], [3.0, -0.00390625, 2.0**100]),
                ("float32", "float32", [2, 2], numbers(4)),
                ("float64", "float64", [3], [0.1, -1e300, 5e-324]),
                ("scalar", "float32", [], [0.75]),
                ("nothing", "float32", [0], []),
            ],
        ),
        (
            "mixed",
            2**64 - 1,
            [
                ("stem.weight", "bfloat16", [2, 1, 3, 3], signs(18, 0.0123)),
                ("stem.bias", "float32", [2], numbers(2)),
                ("größe.weight", "float64", [5, 4], levels(20, 3, 1 / 3)),
                ("head.weight", "float32", [7, 6], sparse(42, [0, 1, 5, 40, 41], numbers(5))),
                ("head.scale", "float16", [1, 3], dense(3)),
                ("no-signs", "float32", [0, 3], signs(0, 1.0)),
                ("no-levels", "float32", [3, 0], levels(0, 4, 0.0)),
                ("no-sparse", "float32", [0, 0], sparse(0, [], [])),
                ("mask", "bool", [2, 2], [True, True, False, True]),
                ("count", "int64", [], [12]),
            ],
        ),
        (
            "seeded",
            5,
            [
                *((f"s{d}", "float32", [1, d], rotated_signs(d, 1 / d, d * 2**56 + 1)) for d in (1, 2, 7, 64, 70)),
                *((f"l{b}", "float32", [3, 9], rotated_levels(27, b, 0.1 * b, 2**64 - b)) for b in (2, 3, 4)),
                ("binary", "float32", [3, 7], masked_noise(21, 0.01, 0, signed=False)),
                ("signed", "float32", [5, 5], masked_noise(25, 0.005, 2**63, signed=True)),
                ("no-signs", "float32", [0, 3], rotated_signs(0, 1.0, 1)),
                ("no-levels", "float32", [3, 0], rotated_levels(0, 2, 0.0, 2)),
                ("no-mask", "float32", [0, 0], masked_noise(0, 1.0, 3, signed=False)),
            ],
        ),
        (
            "odd-levels",
            6,
            [
                *((f"b{b}", "float32", [3, 7], odd_levels(21, b, 0.1 * b)) for b in (2, 3, 4)),
                ("largest", "float32", [1, 5], odd_levels(5, 4, 2e37)),
                ("still", "float32", [2, 2], odd_levels(4, 2, 0.0)),
                ("none", "float32", [3, 0], odd_levels(0, 3, 1.0)),
            ],
        ),
        (
            "channels",
            7,
            [
                *((f"b{b}", "float32", [3, 7], channels(21, b, [0.1 * b, 0.0, 1 / 3])) for b in (2, 3, 4, 8)),
                ("all-of-8", "float32", [2, 256], channels(512, 8, [1.0, 0.7])),
                ("halves", "float16", [2, 1, 3, 3], channels(18, 4, [0.02, 1e-30])),
                ("one", "float32", [1, 9], channels(9, 3, [1e-3])),
                ("each", "float32", [4, 1], channels(4, 2, [1.0, 2.0, 1e-45, 2e38])),
                ("none", "float32", [3, 0], channels(0, 2, [])),
            ],
        ),
        ("graded", 13, [(f"b{b}", "float32", [2, 7], channels(14, b, [0.1 * b, 1 / 3])) for b in (5, 6, 7)]),
    ]


def following() -> dict[str, Any]:
    """A public model, two steps of it, and the messages to one that holds nothing and to one that missed both."""
    entries = [("conv.weight", "compress", [8, 1, 3, 3]), ("conv.bias", "dense", [1]), ("bn.count", "max", [])]
    dtypes = {"compress": torch.float32, "dense": torch.float32, "max": torch.int64}
    layout = Layout(Entry(name, role, dtypes[role], torch.Size(shape)) for name, role, shape in entries)
    signs_of = [[1 if i * i % 7 in few else -1 for i in range(72)] for few in ((1, 2), (0, 2))]
    models = [{"conv.weight": [_float32(0.1 * x) for x in numbers(72)], "conv.bias": [-1.5], "bn.count": [40]}]
    leader = Leader(Follower.of(layout, _tensors(layout, models[0])))
    first = leader.public.held
    for step, turns in zip((0.25, 2.0**-9), signs_of, strict=True):
        weights = [_float32(v + step * sign) for v, sign in zip(models[-1]["conv.weight"], turns, strict=True)]
        true = {"conv.weight": weights, "conv.bias": [step], "bn.count": [models[-1]["bn.count"][0] + 1]}
        leader = leader.lead(_tensors(layout, true))
        (scale,) = struct.unpack("<f", leader.steps[-1].raw[44:48])  # near `step`: w - v was rounded
        moved = [_float32(v + scale * sign) for v, sign in zip(models[-1]["conv.weight"], turns, strict=True)]
        models.append(true | {"conv.weight": moved})
    return {
        "layout": layout.text,
        "models": models,
        "hashes": [held.hash.hex() for held in (first, leader.steps[1].start, leader.public.held)],
        "whole": leader.message(None).hex(),
        "steps": leader.message(first).hex(),
    }


def _tensors(layout: Layout, values: dict[str, list[float]]) -> dict[str, torch.Tensor]:
    return {entry.name: torch.tensor(values[entry.name], dtype=entry.dtype).view(entry.shape) for entry in layout}


def numbers(count: int) -> list[float]:
    """Varied values that float32 holds exactly."""
    return [((37 * i + 11) % 101 - 50) / 64 for i in range(count)]


def dense(count: int) -> dict[str, Any]:
    return {"kind": "dense", "values": numbers(count)}


def signs(count: int, step: float) -> dict[str, Any]:
    step = _float32(step)
    return {"kind": "signs", "step": step, "values": [step if i * i % 7 in (1, 2) else -step for i in range(count)]}


def levels(count: int, width: int, scale: float) -> dict[str, Any]:
    s, scale = 2 ** (width - 1) - 1, _float32(scale)
    j = [5 * i % (2 * s + 1) - s for i in range(count)]
    values = [_float32(_float32(x / s) * scale) for x in j]
    return {"kind": "levels", "width": width, "scale": scale, "levels": j, "values": values}


def odd_levels(count: int, width: int, step: float) -> dict[str, Any]:
    codes, step = [5 * i % 2**width for i in range(count)], _float32(step)
    values = [_float32((2 * code + 1 - 2**width) * step) for code in codes]
    return {"kind": "odd-levels", "width": width, "step": step, "codes": codes, "values": values}


def channels(count: int, width: int, scales: list[float]) -> dict[str, Any]:
    codes, scales = [5 * i % 2**width for i in range(count)], [_float32(scale) for scale in scales]
    top = 2**width - 1
    table = [_float32((2 * k - top) / top) for k in range(top + 1)] if width > 4 else _lloyd_max(width)
    values = [_float32(scales[i * len(scales) // count] * table[code]) for i, code in enumerate(codes)]
    return {"kind": "channels", "width": width, "scales": scales, "codes": codes, "values": values}


def sparse(count: int, positions: list[int], kept: list[float]) -> dict[str, Any]:
    values = dict(zip(positions, map(_float32, kept), strict=True))
    return {"kind": "sparse", "positions": positions, "values": [values.get(i, 0.0) for i in range(count)]}


def rotated_signs(count: int, scale: float, seed: int) -> dict[str, Any]:
    bits, scale = [int(i * i % 7 in (1, 2)) for i in range(count)], _float32(scale)
    values = [_float32(x * scale) for x in _rotate_back([2.0 * bit - 1 for bit in bits], seed)]
    return {"kind": "rotated-signs", "scale": scale, "seed": seed, "bits": bits, "values": values}


def rotated_levels(count: int, width: int, scale: float, seed: int) -> dict[str, Any]:
    codes, scale = [5 * i % 2**width for i in range(count)], _float32(scale)
    levels = _lloyd_max(width)
    values = [_float32(x * scale) for x in _rotate_back([levels[code] for code in codes], seed)]
    return {"kind": "rotated-levels", "width": width, "scale": scale, "seed": seed, "codes": codes, "values": values}


def masked_noise(count: int, half_width: float, seed: int, signed: bool) -> dict[str, Any]:
    bits, half_width = [int(i * i % 7 in (1, 2)) for i in range(count)], _float32(half_width)
    quarters = [_word(seed, i // 4) >> 16 * (i % 4) & 0xFFFF for i in range(count)]
    noise = [_float32(((q ^ 0x8000) - 0x8000 + 0.5) * 2**-15 * half_width) for q in quarters]
    values = [n if bit else -n if signed else 0.0 for n, bit in zip(noise, bits, strict=True)]
    content = {"kind": "masked-noise", "half_width": half_width, "seed": seed, "signed": signed}
    return content | {"bits": bits, "values": values}


LLOYD_MAX = {  # docs/wire-format.md
    2: [0.452780038, 1.51041758],
    3: [0.24509418, 0.756005287, 1.34390926, 2.15194559],
    4: [0.128395036, 0.388048291, 0.656759143, 0.942340434, 1.25623119, 1.6180464, 2.06901717, 2.73258948],
}


def _lloyd_max(width: int) -> list[float]:
    return [_float32(x) for x in [-x for x in reversed(LLOYD_MAX[width])] + LLOYD_MAX[width]]


def _rotate_back(y: list[float], seed: int) -> list[float]:
    n = 1 << len(y).bit_length() >> 1
    x, c = list(y), _float32(n**-0.5) if n else 0.0
    for start, first_word in ((len(x) - n, -(-n // 64)), (0, 0)):
        for j, z in enumerate(_hadamard(x[start : start + n])):
            positive = _word(seed, first_word + j // 64) >> j % 64 & 1
            x[start + j] = _float32(z * c) if positive else -_float32(z * c)
    if n == len(x):
        return x
    columns = math.isqrt(len(x))
    rows = len(x) // columns
    dealt = [j * columns + i for i in range(columns) for j in range(rows)]
    return [x[place] for place in sorted(range(len(dealt)), key=dealt.__getitem__)] + x[len(dealt) :]


def _hadamard(z: list[float]) -> list[float]:
    if len(z) <= 1:
        return z
    low, high = _hadamard(z[: len(z) // 2]), _hadamard(z[len(z) // 2 :])
    pairs = list(zip(low, high, strict=True))
    return [_float32(a + b) for a, b in pairs] + [_float32(a - b) for a, b in pairs]


def _word(seed: int, i: int) -> int:
    z = (seed + (i + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def _assemble(context: int, tensors: list[tuple[Any, ...]]) -> tuple[Payload, dict[str, Any]]:
    """The payload, and everything a test needs to build or to check it."""
    entries, parts, rest = [], {}, {}
    for name, dtype_name, shape, content in tensors:
        dtype = getattr(torch, dtype_name)
        role = "compress" if isinstance(content, dict) else "dense" if dtype.is_floating_point else "max"
        entries.append(Entry(name, role, dtype, torch.Size(shape)))
        if isinstance(content, dict):
            parts[name] = part_of(**content)
        else:
            rest[name] = torch.tensor(content, dtype=dtype).view(shape)
    layout = Layout(entries)
    vector = {
        "context": context,
        "layout_hash": layout.hash.hex(),
        "layout": [
            {"name": e.name, "role": e.role, "dtype": str(e.dtype).removeprefix("torch."), "shape": list(e.shape)}
            for e in layout
        ],
        "parts": {name: content for name, _, _, content in tensors if name in parts},
        "rest": {name: content for name, _, _, content in tensors if name in rest},
    }
    return Payload(layout, parts, rest, context), vector


def part_of(kind: str, values: list[float], **more: Any) -> Part:
    """The part that the content of a tensor describes."""
    x = torch.tensor(values, dtype=torch.float32)
    if kind == "dense":
        return Dense(x)
    if kind == "signs":
        return Signs.of(x > 0, torch.tensor(more["step"]))
    if kind == "levels":
        return Levels.of(torch.tensor(more["levels"]), torch.tensor(more["scale"]), more["width"])
    if kind == "odd-levels":
        return OddLevels.of(torch.tensor(more["codes"]), torch.tensor(more["step"]), more["width"])
    if kind == "channels":
        return Channels(torch.tensor(more["codes"], dtype=torch.uint8), torch.tensor(more["scales"]), more["width"])
    if "seed" in more:
        return _seeded_part(kind, **more)
    positions = torch.tensor(more["positions"], dtype=torch.int64)
    return Sparse(positions, x[positions], len(values))


def _seeded_part(kind: str, seed: int, **more: Any) -> Part:
    signed_seed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
    if kind == "rotated-levels":
        codes = torch.tensor(more["codes"], dtype=torch.uint8)
        return RotatedLevels.of(codes, torch.tensor(more["scale"]), signed_seed, more["width"])
    bits = torch.tensor(more["bits"], dtype=torch.bool)
    if kind == "rotated-signs":
        return RotatedSigns.of(bits, torch.tensor(more["scale"]), signed_seed)
    return MaskedNoise.of(bits, torch.tensor(more["half_width"]), signed_seed, more["signed"])


def _float32(x: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", x))[0]
    return rounded


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN)
