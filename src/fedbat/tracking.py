"""Follow runs in TensorBoard (the extra `tensorboard`). Copy this file to follow them in another tracker.

A tracker is two functions given to `run_recorded`: one sees the record before the first round that is left to do, the
other sees each round. Nothing else in a run knows of it.
"""

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fedbat.errors import ConfigError
from fedbat.records import RunRecord, summarize
from fedbat.simulation import Round
from fedbat.storage import make_folder, write_text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_OWNER = "run.txt"  # next to the log: names the folder of the run


class TensorBoard:
    """Writes the rounds of one run into a folder; runs in folders side by side are shown together."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._open, self._sent = folder, writer_class(), 0

    @cached_property
    def _writer(self) -> "SummaryWriter":
        """Opened when something is first logged: a finished run logs nothing, and what it logged before stays.

        A run that goes on is logged again from its first round; what was written before does not count.
        """
        return self._open(str(self._folder), purge_step=0)

    def begin(self, record: RunRecord) -> None:
        """Log a run that starts, or that goes on after the rounds it has."""
        check_board(self._folder, record.folder)
        asked = json.dumps(summarize(record.federation, [])["config"], indent=2)
        self._writer.add_text("configuration", f"```json\n{asked}\n```", 0)
        write_text(self._folder / _OWNER, f"{record.folder.resolve()}\n")
        for round_ in record.rounds:
            self.round(round_)

    def round(self, round_: Round) -> None:
        """Log a finished round."""
        self._sent += round_.uplink_bytes
        for name, value in figures(round_):
            self._writer.add_scalar(name, value, round_.index + 1)
        self._writer.add_scalar("bytes/uplink so far", self._sent, round_.index + 1)
        self._writer.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if "_writer" in vars(self):
            self._writer.close()


def check_board(folder: Path, run: Path) -> None:
    """Refuse a folder in which another run is logged, as that log would be lost, or that cannot be made."""
    owner = folder / _OWNER
    if owner.exists() and (other := owner.read_text().strip()) != str(run.resolve()):
        raise ConfigError(f"{folder} is the log of another run, {other}; name another folder for TensorBoard")
    make_folder(folder)


def writer_class() -> type["SummaryWriter"]:
    """The class that writes TensorBoard's files; ConfigError if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("TensorBoard is not installed; pip install tensorboard") from None
    return SummaryWriter


def figures(round_: Round) -> Iterator[tuple[str, float]]:
    """The figures of a round by name, whichever tracker they are sent to."""
    yield "accuracy", round_.accuracy
    for name, other in (("received", round_.received), ("averaged", round_.averaged)):
        if other is not None:
            yield f"accuracy/{name}", other.accuracy
    yield "loss/test", round_.loss
    yield "loss/train", round_.train_loss
    yield "bytes/uplink", round_.uplink_bytes
    yield "bytes/downlink", round_.downlink_bytes
    yield "clients lost", len(round_.lost)
    yield "seconds", round_.seconds
    for layer, report in round_.layers.items():
        for what, value in report._asdict().items():
            if value is not None:
                yield f"{what}/{layer}", value
