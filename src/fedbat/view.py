"""What a person sees during a run: a live line in a terminal, plain lines elsewhere."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedbat.simulation import Round
from fedbat.units import loss, megabytes


class RunView:
    """Follows one run, client by client and round by round."""

    def __init__(self, console: Console, label: str, num_rounds: int, per_round: int, num_parameters: int) -> None:
        self.console, self.label, self.num_rounds = console, label, num_rounds
        self.per_round, self.num_parameters = per_round, num_parameters
        self.num_done, self._uplink, self._start, self._before = 0, 0, 0.0, 0
        bar = [BarColumn(bar_width=20)] if console.width >= 110 else []  # the figures matter more than the bar
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            *bar,
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        first = f"round 0/{num_rounds}"
        self._task = self._progress.add_task(label, total=num_rounds * per_round, figures=first)

    def begin(self, done: Sequence[Round]) -> None:
        """The run starts, or goes on after these rounds."""
        self.num_done = self._before = len(done)
        self._uplink = sum(round_.uplink_bytes for round_ in done)
        figures = f"round {len(done)}/{self.num_rounds}"
        self._progress.update(self._task, completed=len(done) * self.per_round, figures=figures)

    def client(self) -> None:
        """A client has finished."""
        self._progress.advance(self._task)

    def round(self, round_: Round) -> None:
        """A round has finished."""
        for client, reason in round_.lost.items():
            self.console.print(f"[yellow]round {round_.index + 1} went on without client {client}:[/] {escape(reason)}")
        self._uplink += round_.uplink_bytes
        self.num_done = done = round_.index + 1
        bits = 8 * round_.uplink_bytes / round_.num_uploads / self.num_parameters
        unit = "bit" if self.console.is_terminal and self.console.width < 90 else "bit/param"
        figures = (
            f"round {done}/{self.num_rounds}  acc {100 * round_.accuracy:.1f} %  loss {loss(round_.loss)}  "
            f"up {megabytes(self._uplink)}  {bits:.2f} {unit}"
        )
        self._progress.update(self._task, completed=done * self.per_round, figures=figures)
        if not self.console.is_terminal:
            self.console.print(f"{self.label}  {figures}{self._left(done)}", soft_wrap=True, highlight=False)

    def _left(self, done: int) -> str:
        """The time left, by the rounds after the first, which also starts things up."""
        timed = done - self._before - 1
        if timed < 1:
            self._start = time.perf_counter()
            return ""
        return f"  {(time.perf_counter() - self._start) / timed * (self.num_rounds - done):.0f} s left"

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
