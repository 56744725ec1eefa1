"""Which replies of a round are added: decoded, checked against the round and against each other, in client order."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flwr.app import Message, MetricRecord
from flwr.common.constant import SUPERLINK_NODE_ID

from fedbat.errors import WireError
from fedbat.flower.records import CONFIG, UPLOAD, client_in, failure_in, refusal_in, unpacked
from fedbat.layout import Layout
from fedbat.method import Method
from fedbat.parts import largest
from fedbat.server import MAX_WEIGHT
from fedbat.streams import Tensors
from fedbat.wire import Payload


class Rules(NamedTuple):
    """What a reply must obey to be added, in every round."""

    method: Method
    layout: Layout
    weight_key: str  # of the metric that tells how many samples the client has
    max_examples: float  # that a client may claim
    max_ratio: float  # of what a client sends to the median of the round


@dataclass(frozen=True)
class Upload:
    """One client's packed update."""

    client: int
    weight: float
    payload: Payload
    num_bytes: int
    reply: Message


@dataclass(frozen=True)
class Dropped:
    """A reply that is not added, and why."""

    node: int
    kind: str  # failed, refused, malformed, weight, twice, metrics, step or size
    reason: str


def read_replies(
    replies: Iterable[Message], rules: Rules, round_: int, w: Tensors, clients: Mapping[int, int]
) -> tuple[list[Upload], list[Dropped]]:
    """The uploads to add, in client order, and what was dropped; w is the model they change, `clients` is by node.

    A step size must lie within the method's bounds (or be 0: a layer that did not move), and within a factor
    `max_ratio` of the round's median for that layer. Values without a step size may be as many times as large as the
    round's median for that tensor or as the tensor itself, whichever is larger.
    """
    found: dict[int, Upload] = {}
    dropped: list[Dropped] = []
    for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
        node = reply.metadata.src_node_id
        if node == SUPERLINK_NODE_ID:  # says that a node is gone, but not which one
            continue
        if (reason := failure_in(reply)) is not None:
            dropped.append(Dropped(node, "failed", reason))
            continue
        if (reason := refusal_in(reply)) is not None:
            dropped.append(Dropped(node, "refused", f"it could not take the model: {reason}"))
            continue
        try:
            upload = _read(reply, rules, round_, clients)
            _check_bounds(upload.payload, rules.method.step_bounds)
        except _Refused as refused:
            dropped.append(Dropped(node, refused.kind, str(refused)))
            continue
        if upload.client in found:
            dropped.append(Dropped(node, "twice", f"client {upload.client} has answered already in this round"))
            continue
        found[upload.client] = upload
    uploads = [found[client] for client in sorted(found)]
    odd = _far_from_others(uploads, rules, w) | _with_other_metrics({u.client: u.reply for u in uploads})
    dropped += [
        Dropped(upload.reply.metadata.src_node_id, odd[upload.client].kind, str(odd[upload.client]))
        for upload in uploads
        if upload.client in odd
    ]
    return [upload for upload in uploads if upload.client not in odd], dropped


def read_scores(replies: Iterable[Message], rules: Rules) -> tuple[list[Message], dict[int, str]]:
    """The replies of clients that evaluated, as the strategy expects them, and why other nodes' are dropped."""
    found: dict[int, Message] = {}
    odd: dict[int, str] = {}
    failed = []  # for the strategy to tell of
    for reply in replies:
        node = reply.metadata.src_node_id
        if reply.has_error():
            failed.append(reply)
        elif refusal_in(reply) is None:
            reply.content.pop(CONFIG, None)
            try:
                _weight(reply, rules)
                found[node] = reply
            except _Refused as refused:
                odd[node] = str(refused)
    odd |= {node: str(refused) for node, refused in _with_other_metrics(found).items()}
    return failed + [reply for node, reply in found.items() if node not in odd], odd


class _Refused(Exception):
    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def _read(reply: Message, rules: Rules, round_: int, clients: Mapping[int, int]) -> Upload:
    node, content = reply.metadata.src_node_id, reply.content
    arrays = list(content.array_records.values())
    try:
        if len(arrays) != 1:
            raise WireError(f"{len(arrays)} array records, expected one; does the ClientApp have fedbat_mod?")
        data = unpacked(arrays[0], UPLOAD)
        payload = Payload.from_bytes(data, rules.layout, round_, rules.method.kinds)
    except WireError as error:
        raise _Refused("malformed", str(error)) from None
    weight = _weight(reply, rules)
    told = client_in(content.config_records[CONFIG]) if CONFIG in content.config_records else None
    client = clients.get(node, node if told is None else told)
    return Upload(client, weight, payload, len(data), reply)


def _weight(reply: Message, rules: Rules) -> float:
    weight = next(iter(reply.content.metric_records.values()), MetricRecord()).get(rules.weight_key)
    if not isinstance(weight, int | float) or not 1 / MAX_WEIGHT <= weight <= rules.max_examples:
        raise _Refused(
            "weight",
            f"its metric {rules.weight_key!r} is {weight}, expected a positive number of at most "
            f"{rules.max_examples:g} samples",
        )
    return float(weight)


def _check_bounds(payload: Payload, bounds: tuple[float, float] | None) -> None:
    for name, part in payload.parts.items():
        step = None if part.step is None else float(part.step)
        # The bounds are written in float64, step sizes in float32.
        if bounds and step and not bounds[0] * (1 - 1e-6) <= step <= bounds[1] * (1 + 1e-6):
            raise _Refused(
                "step", f"{name} has step size {step:g}, outside the declared {bounds[0]:g} to {bounds[1]:g}"
            )


def _with_other_metrics(replies: Mapping[int, Message]) -> dict[int, _Refused]:
    """Those whose metrics cannot be averaged with most others': Flower wants one record each, with the same keys."""
    forms = {number: _form_of_metrics(reply) for number, reply in replies.items()}
    return {
        client: _Refused("metrics", f"its metrics are {_names(form)}, expected {_names(usual)}, as most have")
        for usual, _ in Counter(forms.values()).most_common(1)
        for client, form in forms.items()
        if form != usual
    }


def _form_of_metrics(reply: Message) -> frozenset[tuple[int, str, int | None]]:
    """A reply's metrics: in which record each is, its key, and its length if it is a list."""
    return frozenset(
        (number, key, len(value) if isinstance(value, list) else None)
        for number, record in enumerate(reply.content.metric_records.values())
        for key, value in record.items()
    )


def _names(form: Iterable[tuple[int, str, int | None]]) -> str:
    return ", ".join(key if length is None else f"{key}[{length}]" for _, key, length in sorted(form, key=str))


def _far_from_others(uploads: list[Upload], rules: Rules, w: Tensors) -> dict[int, _Refused]:
    """The clients whose step sizes are far above or below the others', or whose other values are far above."""
    far: dict[int, _Refused] = {}
    if len(uploads) < 3:  # of two, neither is the odd one out
        return far
    for entry in rules.layout:
        if entry.role == "max":
            continue
        sizes = {upload.client: _size(upload.payload, entry.name) for upload in uploads}
        moved = [size for _, size in sizes.values() if size > 0]
        median = statistics.median(moved) if moved else 0.0
        usual_sizes = {"step": median, "size": max(median, largest(w[entry.name]))}
        for client, (kind, size) in sizes.items():
            usual = usual_sizes[kind]
            too_small = kind == "step" and 0 < size < usual / rules.max_ratio
            if too_small or size > usual * rules.max_ratio:
                what = f"{entry.name} has {_WHAT[kind]} {size:g}"
                far[client] = _Refused(kind, f"{what}, more than {rules.max_ratio:g} times off the round's {usual:g}")
    return far


_WHAT = {"step": "step size", "size": "values up to"}


def _size(payload: Payload, name: str) -> tuple[str, float]:
    """A tensor's step size where it has one, else its largest magnitude."""
    if name in payload.rest:
        return "size", largest(payload.rest[name])
    part = payload.parts[name]
    return ("size", part.largest()) if part.step is None else ("step", float(part.step))


def commonest(dropped: list[Dropped]) -> str:
    """Why most replies of a round were dropped."""
    if not dropped:
        return "no node replied"
    ((kind, count),) = Counter(drop.kind for drop in dropped).most_common(1)
    reason = next(drop.reason for drop in dropped if drop.kind == kind)
    return f"{count} of {len(dropped)} replies were dropped as {kind}, such as: {reason}"


def traffic(uploads: list[Upload], dropped: list[Dropped]) -> dict[str, Any]:
    """Metrics of a round's replies; bytes as packed, without Flower's own signaling."""
    found: dict[str, Any] = {
        "fedbat-uploads": len(uploads),
        "fedbat-uplink-bytes": sum(upload.num_bytes for upload in uploads),
        "fedbat-dropped": len(dropped),
    }
    for drop in dropped:
        key = f"fedbat-dropped-{drop.kind}"
        found[key] = found.get(key, 0) + 1
    return found
