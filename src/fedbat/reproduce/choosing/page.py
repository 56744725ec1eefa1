"""The blocks, by name, of the pages that say which method and how many bits to choose."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from fedbat.downlink import FOLLOW
from fedbat.reproduce.choosing.choices import Choices
from fedbat.reproduce.choosing.down import ANY, recommended_width, width, widths
from fedbat.reproduce.choosing.tables import every_choice, transfer
from fedbat.reproduce.choosing.up import BITS, swings, uplink
from fedbat.reproduce.choosing.words import NOT_YET, paragraph
from fedbat.reproduce.record import Records
from fedbat.reproduce.results import Results
from fedbat.reproduce.tables import Book

TWO_BITS = BITS["2"].method
SMALL = "--clients 20 --per-round 5 --rounds 10 --epochs 2"  # takes about a minute on the bundled images


def blocks(book: Book, records: Records, folder: Path) -> dict[str, str]:
    """The blocks by name, from the records of runs and from the engine's measurements on a GPU in their folder."""
    choices = Choices(book, Results(book, records))
    made = {name: make(choices) for name, make in BLOCKS.items()} | {"costs": _costs(folder / "cuda" / "ratio.json")}
    return {name: "\n".join(lines) for name, lines in made.items()}


def _commands(choices: Choices) -> Iterator[str]:
    """Commands that run a choice in the simulation."""
    best = recommended_width(choices)
    down = best or ANY
    yield from [
        "```bash",
        "# devices that come and go" + ("" if best else f" (which width: {NOT_YET})"),
        f"fedbat run --down {down} {SMALL}",
        f"# the same clients in every round{_untried(choices, down=FOLLOW)}",
        "fedbat run --down follow --clients 10 --per-round 10 --rounds 10 --epochs 2",
        f"# skewed labels, if one bit up loses too much: two bits{_untried(choices, method=TWO_BITS)}",
        f"fedbat run --set bits=2 --down {down} --partition labels {SMALL}",
        "# beside FedAvg, on your link",
        f"fedbat compare --methods fedavg,fedbat --down 32,{down} {SMALL} --link up=10,down=50",
        "```",
    ]


def _untried(choices: Choices, **wanted: str) -> str:
    """A remark on a choice if nothing like it has a record."""
    found = choices.listed(choices.places)
    tried = any(all(getattr(choice, name) == value for name, value in wanted.items()) for choice in found)
    return "" if tried else f" ({NOT_YET})"


def _flower(choices: Choices) -> Iterator[str]:
    """The same choices in Flower."""
    down = recommended_width(choices) or ANY
    yield from [
        "```python",
        f'strategy = Compressed(strategy, FedBAT(), model, down="{down}", average=0.9)  # devices that come and go',
        'strategy = Compressed(strategy, FedBAT(), model, down="follow", average=0.9)  # the same nodes in every round'
        + _untried(choices, down=FOLLOW),
        f'strategy = Compressed(strategy, FedBAT(bits=2), model, down="{down}", average=0.9)  # two bits up'
        + _untried(choices, method=TWO_BITS),
        "```",
    ]


def _costs(path: Path) -> Iterator[str]:
    """What a FedBAT round costs on a GPU, relative to a FedAvg round."""
    if not path.is_file():
        yield f"On a GPU: {NOT_YET}."
        return
    record = json.loads(path.read_text())
    told = [
        f"{row['fedbat_over_fedavg']:.3f} times as long as FedAvg's in {row['precision']}, with a peak of "
        f"{row['peak_MiB_of_ten_clients']['fedbat']:,} MiB for ten clients instead of "
        f"{row['peak_MiB_of_ten_clients']['fedavg']:,}"
        for row in record["rows"]
    ]
    yield paragraph(
        f"On a GPU ({record['machine']['gpu']}) a round of FedBAT that binarizes in every step, not only in the second "
        f"half as by default, takes {'; '.join(told)}."
    )


BLOCKS: dict[str, Callable[[Choices], Iterator[str]]] = {
    "width": width,
    "widths": widths,
    "transfer": transfer,
    "uplink": uplink,
    "swings": swings,
    "every-choice": every_choice,
    "commands": _commands,
    "flower": _flower,
}
