"""Which replies of a round are added: decoded, checked against the round and against each other, in client order."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Message
from flwr.common.constant import SUPERLINK_NODE_ID

from fedbat.errors import WireError
from fedbat.flower.records import CONFIG, UPLOAD, client_in, refusal_in, unpacked
from fedbat.layout import Layout
from fedbat.wire import Payload


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
    kind: str  # failed, refused, malformed, weight, twice or step
    reason: str


def read_replies(
    replies: Iterable[Message],
    layout: Layout,
    round_: int,
    weight_key: str,
    clients: Mapping[int, int],
    bounds: tuple[float, float] | None,
    max_ratio: float,
) -> tuple[list[Upload], list[Dropped]]:
    """The uploads to add, by client, and what was dropped.

    `clients` says who a node is. A step size must lie within `bounds` (or be 0: a layer that did not move), and within
    a factor `max_ratio` of the round's median for that layer.
    """
    found: dict[int, Upload] = {}
    dropped: list[Dropped] = []
    for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
        node = reply.metadata.src_node_id
        if node == SUPERLINK_NODE_ID:  # says that a node is gone; which one, it does not say
            continue
        if reply.has_error():
            dropped.append(Dropped(node, "failed", f"the client failed: {reply.error.reason}"))
            continue
        if (reason := refusal_in(reply)) is not None:
            dropped.append(Dropped(node, "refused", f"it could not take the model: {reason}"))
            continue
        try:
            upload = _read(reply, layout, round_, weight_key, clients)
            _check_bounds(upload.payload, bounds)
        except _Refused as refused:
            dropped.append(Dropped(node, refused.kind, str(refused)))
            continue
        if upload.client in found:
            dropped.append(Dropped(node, "twice", f"client {upload.client} has answered already in this round"))
            continue
        found[upload.client] = upload
    uploads = [found[client] for client in sorted(found)]
    far = _far_from_median(uploads, max_ratio)
    dropped += [
        Dropped(upload.reply.metadata.src_node_id, "step", far[upload.client])
        for upload in uploads
        if upload.client in far
    ]
    return [upload for upload in uploads if upload.client not in far], dropped


class _Refused(Exception):
    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def _read(reply: Message, layout: Layout, round_: int, weight_key: str, clients: Mapping[int, int]) -> Upload:
    node, content = reply.metadata.src_node_id, reply.content
    arrays = list(content.array_records.values())
    try:
        if len(arrays) != 1:
            raise WireError(f"{len(arrays)} array records, expected one; does the ClientApp have fedbat_mod?")
        data = unpacked(arrays[0], UPLOAD)
        payload = Payload.from_bytes(data, layout, context=round_)
    except WireError as error:
        raise _Refused("malformed", str(error)) from None
    weight = next((record[weight_key] for record in content.metric_records.values() if weight_key in record), None)
    if not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise _Refused("weight", f"its metric {weight_key!r} is {weight}, expected a positive number of samples")
    told = client_in(content.config_records[CONFIG]) if CONFIG in content.config_records else None
    client = clients.get(node, node if told is None else told)
    return Upload(client, float(weight), payload, len(data), reply)


def _check_bounds(payload: Payload, bounds: tuple[float, float] | None) -> None:
    for name, part in payload.parts.items():
        step = None if part.step is None else float(part.step)
        # The bounds are written in float64, step sizes in float32.
        if bounds and step and not bounds[0] * (1 - 1e-6) <= step <= bounds[1] * (1 + 1e-6):
            raise _Refused(
                "step", f"{name} has step size {step:g}, outside the declared {bounds[0]:g} to {bounds[1]:g}"
            )


def _far_from_median(uploads: list[Upload], max_ratio: float) -> dict[int, str]:
    """Whose step sizes are a multiple of what the others' are, or a fraction."""
    far: dict[int, str] = {}
    if len(uploads) < 3:  # of two, neither is the odd one
        return far
    for name in uploads[0].payload.parts:
        sent = {upload.client: upload.payload.parts[name].step for upload in uploads}
        steps = {client: float(step) for client, step in sent.items() if step is not None}
        moved = [step for step in steps.values() if step > 0]
        median = statistics.median(moved) if moved else 0.0
        for client, step in steps.items():
            if step > 0 and not median / max_ratio <= step <= median * max_ratio:
                far[client] = f"{name} has step size {step:g}, more than {max_ratio:g} times off the round's {median:g}"
    return far


def traffic(uploads: list[Upload], dropped: list[Dropped]) -> dict[str, Any]:
    """Metrics of a round's replies; bytes as packed, without Flower's own signalling."""
    found: dict[str, Any] = {
        "fedbat-uploads": len(uploads),
        "fedbat-uplink-bytes": sum(upload.num_bytes for upload in uploads),
        "fedbat-dropped": len(dropped),
    }
    for drop in dropped:
        key = f"fedbat-dropped-{drop.kind}"
        found[key] = found.get(key, 0) + 1
    return found
