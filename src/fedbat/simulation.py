"""A whole federated run on one machine: sample clients, train them, add their uploads, test, repeat."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fedbat.averaging import averaged
from fedbat.downlink import DOWNLINKS, Public
from fedbat.engine.base import ClientResult, Engine, Evaluation, Lost
from fedbat.errors import DivergedError, MethodError, WireError
from fedbat.experiment import Federation
from fedbat.layout import tensors_of
from fedbat.memories import Memories
from fedbat.server import Aggregator
from fedbat.streams import Tensors
from fedbat.training import LayerReport
from fedbat.wire import Payload


@dataclass(frozen=True)
class Round:
    """What one round did."""

    index: int  # from 0
    accuracy: float
    loss: float
    train_loss: float  # mean over clients
    clients: list[int]  # that were sampled
    lost: dict[int, str]  # those of them whose work could not be done, and why
    uplink_bytes: int  # of all clients together
    uplink_nbits: int  # of the method's own parts
    downlink_bytes: int
    layers: dict[str, LayerReport]  # mean over clients
    seconds: float
    received: Evaluation | None = None  # how well the model that clients receive does, if it is not the model itself
    averaged: Evaluation | None = None  # how well the averaged model does, if one is kept
    # In the order of `clients`; empty in records from before these were kept.
    uploads: list[int] = field(default_factory=list)  # bytes; 0 from a client that was lost
    downloads: list[int] = field(default_factory=list)  # bytes
    client_seconds: list[float | None] = field(default_factory=list)  # None where the engine cannot tell
    server_seconds: float = 0.0  # to unpack and add the uploads and to pack what goes down next

    @property
    def num_uploads(self) -> int:
        """The number of clients that sent an upload."""
        return len(self.clients) - len(self.lost)


class State(NamedTuple):
    """Everything a run carries from round to round; all else follows from the experiment and the round's number."""

    w: Tensors  # the global tensors that travel
    memories: Memories  # what clients remember; an older state's are gone once the next round has begun
    average: Tensors = {}  # noqa: RUF012  # of w over the rounds, if one is kept
    public: Public | None = None  # what clients follow, if they do; otherwise what they receive is a function of w


def initial_state(federation: Federation, memories: Memories | None = None) -> State:
    """The model as built, and no memories; an empty `memories` decides where they will be kept."""
    tensors = tensors_of(federation.model, federation.layout)
    w = {name: tensor.clone() for name, tensor in tensors.items()}
    return State(w, Memories() if memories is None else memories)


def rounds(
    federation: Federation,
    engine: Engine,
    state: State,
    on_client: Callable[[], None] = lambda: None,
    *,
    first: int = 0,
) -> Iterator[tuple[Round, State]]:
    """Run the rounds from `first` on; yields each with the state after it, and calls `on_client` after each client.

    `state` is the one before round `first`: a run that goes on from one of its states gives the results it would have
    had. If clients remember, it must be the newest state or a `Checkpoint`: each round forgets what older ones held.
    """
    experiment, layout = federation.experiment, federation.layout
    downlink = DOWNLINKS[experiment.down]
    if downlink.on_any_device:
        state = state._replace(w=_at(engine.home, state.w), average=_at(engine.home, state.average))
    public = state.public or downlink.publish(layout, state.w, None, first)
    for index in range(first, experiment.num_rounds):
        start = time.perf_counter()
        clients = federation.sampled(index)
        aggregator = Aggregator(federation.method, layout, state.w, public.w)
        memories = state.memories.begin()
        downloads, public = downlink.reach(layout, public, clients, index)
        arriving = engine.train(public.w, index, clients, state.memories)
        heard = _add_all(arriving, aggregator, memories, federation, index, on_client)
        all_arrived = time.perf_counter()
        w = aggregator.result()
        public = downlink.publish(layout, w, public, index + 1)
        followed = public if public.versions else None
        state = State(w, memories, averaged(state.average, w, experiment.average), followed)
        server_seconds = heard.seconds + time.perf_counter() - all_arrived
        spent = {result.client: result.seconds for result in heard.results}
        accuracy, loss = engine.evaluate(w)
        yield (
            Round(
                index=index,
                accuracy=accuracy,
                loss=loss,
                train_loss=sum(r.train_loss for r in heard.results) / len(heard.results),
                clients=clients,
                lost=heard.lost,
                uplink_bytes=sum(heard.sizes.values()),
                uplink_nbits=sum(r.nbits for r in heard.results),
                downlink_bytes=sum(downloads),
                layers=_mean_reports(heard.results),
                received=None if public.w is w else engine.evaluate(public.w),
                averaged=engine.evaluate(state.average) if state.average else None,
                seconds=time.perf_counter() - start,
                uploads=[heard.sizes.get(client, 0) for client in clients],
                downloads=downloads,
                client_seconds=[spent.get(client) for client in clients],
                server_seconds=server_seconds,
            ),
            state,
        )


class _Heard(NamedTuple):
    """What the clients of a round returned, except for their uploads and memories."""

    results: list[ClientResult]
    lost: dict[int, str]
    sizes: dict[int, int]  # bytes of the uploads, by client
    seconds: float  # to unpack and add them


def _add_all(
    arriving: Iterable[ClientResult | Lost],
    aggregator: Aggregator,
    memories: Memories,
    federation: Federation,
    index: int,
    on_client: Callable[[], None],
) -> _Heard:
    """Add each upload as it arrives, and keep the client's memory."""
    results: list[ClientResult] = []
    lost, sizes, seconds = dict[int, str](), dict[int, int](), 0.0
    for result in arriving:
        if isinstance(result, Lost):
            lost[result.client] = result.reason
            on_client()
            continue
        arrived = time.perf_counter()
        _add(aggregator, result, federation.weight(result.num_samples), index)
        seconds += time.perf_counter() - arrived
        if result.memory:
            memories.remember(result.client, result.memory)
        sizes[result.client] = len(result.upload)
        result = result._replace(upload=b"", memory={})  # what was added is forgotten before the next one trains
        results.append(result)
        on_client()
    if not results:
        raise MethodError(f"round {index + 1}: no client finished; {'; '.join(lost.values())}")
    return _Heard(results, lost, sizes, seconds)


def _at(device: torch.device, tensors: Tensors) -> Tensors:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _add(aggregator: Aggregator, result: ClientResult, weight: float, index: int) -> None:
    try:
        payload = Payload.from_bytes(result.upload, aggregator.layout, index, aggregator.method.kinds)
    except WireError as error:
        hint = "; lower --lr" if isinstance(error, DivergedError) else ""
        raise type(error)(f"round {index + 1}, client {result.client}: {error}{hint}") from None
    aggregator.add(payload, weight)


def _mean_reports(results: list[ClientResult]) -> dict[str, LayerReport]:
    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    merged = {}
    for name in results[0].layers:
        reports = [r.layers[name] for r in results]
        merged[name] = LayerReport(
            sum(r.relative_error for r in reports) / len(reports),
            mean([r.step for r in reports]),
            mean([r.clipped for r in reports]),
        )
    return merged
