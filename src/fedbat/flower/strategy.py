"""The server's side: compression around any averaging Flower strategy.

Replies are decoded and added one by one, in the order of partition ids, to one sum; the strategy inside gets a single
reply, their mean, and processes it as always (FedAvg, FedAdam, FedYogi, FedProx, ...). Memory does not grow with the
number of clients beyond the packed replies that Flower hands over. Strategies that compare clients get one dense
model per client.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from fedbat.averaging import averaged, check_average
from fedbat.downlink import FOLLOW, FULL, check_downlink
from fedbat.errors import ConfigError
from fedbat.flower.carried import Carried
from fedbat.flower.checkpoint import ServerCheckpoint
from fedbat.flower.delivery import Delivery, SecondTry
from fedbat.flower.manifest import Manifest
from fedbat.flower.nodes import Nodes, Question
from fedbat.flower.records import CONFIG, Orders, record_of_tensors, tensors_of_record
from fedbat.flower.sending import SENDING
from fedbat.flower.suited import (
    COMPARING,
    check_around,
    check_drafts,
    check_model,
    check_result,
    check_strategy,
    is_own,
    metrics_known,
)
from fedbat.flower.uploads import Rules, Upload, commonest, read_replies, read_scores, traffic
from fedbat.layout import Role, layout_of, tied_names, uncompiled, whole_layout
from fedbat.lock import locked
from fedbat.method import Method
from fedbat.methods import method_name
from fedbat.server import Aggregator, not_finite
from fedbat.streams import Tensors, stream

_TOO_OFTEN = 3  # rounds without an upload, after which it is no chance
_IN_VAIN = (
    "fedbat: nothing was learned in %s rounds in a row; %s; is mods=[fedbat_mod] in the ClientApp, and is its model "
    "the one that was given here?"
)
_NO_EVALUATION = (
    "fedbat: clients do not evaluate, although fraction_evaluate is %s; evaluate_on_clients=True lets them, at a "
    "second download of the model"
)
_ONE_REPLY = (
    "fedbat: %s.aggregate_train is given a single reply, the mean of all uploads; if it compares clients, derive it "
    "from FedMedian or another strategy that does, which is given each client's model"
)


class Compressed(Strategy):
    """`Compressed(FedAvg(...), FedBAT(), model)`: the strategy inside, with updates of one bit per weight.

    model       whose tensors travel; `roles` overrides which are compressed (see fedbat.layout_of)
    seed        makes the run repeatable: clients are then sampled by partition id, and their sign decisions follow from
                seed, round and partition id. None: Flower's own sampling, and clients draw their own noise.
    timeout     seconds a round waits for replies; a client that has not answered by then is left out
    max_ratio   of a reply's step sizes (or other values) to the round's median, beyond which it is dropped
    max_examples  that a client may claim to have; what it claims is its weight in the mean
    down        how the model goes down: "32" bits per weight, a snapshot of "8", "4", "3" or "2", or "follow": one bit,
                to nodes that keep a copy. The true model stays on the server: evaluate_fn and the result have that
    keep_frozen  nodes keep what never changes (frozen parameters, the role skip), and it goes down once, not in every
                round; nodes that follow always keep it
    average     weight of the past in the averaged model, such as 0.9; 0: none is kept
    checkpoint  folder in which every round is saved, and from which `start` goes on
    evaluate_on_clients  send the model a second time, for the clients to evaluate; better give `start` an evaluate_fn

    `received` is the model as clients have it, `averaged` the averaged one: after each round, also in evaluate_fn.
    """

    def __init__(
        self,
        strategy: Strategy,
        method: Method,
        model: nn.Module,
        *,
        roles: Mapping[str, Role] | None = None,
        seed: int | None = 0,
        timeout: float = 600.0,
        max_ratio: float = 100.0,
        max_examples: float = 1e12,
        down: str | int = FULL,
        keep_frozen: bool = False,
        average: float = 0.0,
        checkpoint: str | Path | None = None,
        evaluate_on_clients: bool = False,
    ) -> None:
        check_strategy(strategy)
        method_name(method)  # the name by which clients make it
        if seed is not None and not 0 <= seed < 2**63:
            raise ConfigError(f"seed={seed}, expected a whole number from 0 to 2^63 - 1, or None")
        if not (timeout > 0 and max_ratio > 1 and 0 < max_examples <= 1e12):
            raise ConfigError(
                f"timeout={timeout}, max_ratio={max_ratio}, max_examples={max_examples}, expected more than 0 seconds, "
                "more than 1, and more than 0 but at most 1e12"
            )
        model, down = uncompiled(model), str(down)
        check_downlink(down)
        check_average(average)
        self.strategy, self.method, self.layout = strategy, method, layout_of(model, roles)
        self.roles, self.seed, self.timeout = dict(roles or {}), seed, timeout
        self._rules = Rules(method, self.layout, self._weight_key, max_examples, max_ratio)
        self.down, self.average, self.evaluate_on_clients = down, average, evaluate_on_clients
        self._parameters = {name for name, _ in model.named_parameters()}
        self._checkpoint = None if checkpoint is None else ServerCheckpoint(Path(checkpoint))
        self._rounds_before = 0  # of the run that this one continues
        self._nodes = Nodes()
        self._whole, self._tied = whole_layout(model, self.layout), tied_names(model)
        sent = {entry.name for entry in self.layout}
        self._frozen = {e.name for e in self._whole if self._tied.get(e.name, e.name) not in sent}
        self._kept = self._frozen if keep_frozen or down == FOLLOW else set()
        self._w: Tensors = {}  # the true model
        self._past: Tensors = {}  # its average
        self._begun: Delivery | None = None
        self._training = uuid4().hex  # names what clients remember
        self._asked: list[int] = []
        self._in_vain = 0  # rounds in a row without an upload

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Start as every Flower strategy does, or go on after the last round of the checkpoint."""
        with nullcontext() if self._checkpoint is None else locked(self._checkpoint.folder):
            saved: dict[str, Tensors] = {}
            self.timeout = self.timeout if timeout is None else timeout
            self._training = uuid4().hex  # what clients remember of an earlier one is not of this one
            if self._checkpoint is not None:
                self._training = self._checkpoint.name_of(self._training)
            if self._checkpoint is not None and self._checkpoint.exists():
                self._rounds_before, saved, settings = self._checkpoint.load(self.strategy)
                initial_arrays = record_of_tensors(saved["model"])
                log(INFO, "fedbat: going on after round %s of %s", self._rounds_before, num_rounds)
                for name, now in self._settings.items():
                    if (before := settings.get(name, now)) != now:
                        log(WARNING, "fedbat: going on with another %s: %s before, %s now", name, before, now)
            self._past = saved.get("average", {})
            self._begin(tensors_of_record(initial_arrays), saved.get("public", {}))
            before = self._rounds_before
            result = super().start(
                cast(Grid, SecondTry(grid, self._delivery.again)), initial_arrays, max(0, num_rounds - before),
                self.timeout, train_config, evaluate_config,
                evaluate_fn and (lambda round_, arrays: evaluate_fn(round_ + before, arrays)),
            )  # fmt: skip
            if before:
                for found in (
                    result.train_metrics_clientapp,
                    result.evaluate_metrics_clientapp,
                    result.evaluate_metrics_serverapp,
                ):
                    shifted = {round_ + before: metrics for round_, metrics in found.items()}
                    found.clear()
                    found.update(shifted)
            result.arrays = result.arrays or initial_arrays  # no round has changed them
            return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy inside decides how many clients and with which settings; the model goes down packed."""
        round_ = server_round + self._rounds_before
        before, self._w = self._w, tensors_of_record(arrays)
        if self._begun is None:  # a loop other than `start`
            check_around()
            self._begin(self._w, {})
        elif before and any(not torch.equal(before[name], x) for name, x in self._w.items()):
            self._delivery.go_on(self._w)  # somebody changed the model between two rounds
        given = self._parameters_of(self._w)
        drafts = list(self.strategy.configure_train(round_, given, config, grid))
        if not drafts:
            return self._delivery.nothing()
        check_drafts(drafts, given)
        chosen = [draft.metadata.dst_node_id for draft in drafts]
        orders = self._orders(round_)
        if self.seed is not None:
            content = RecordDict(dict(drafts[0].content.items()))  # mods around ours may read the strategy's settings
            for key in list(content.array_records):
                del content[key]
            content[CONFIG] = replace(orders, hello=True).to_config()
            question = Question(content, drafts[0].metadata.message_type)
            known = self._nodes.meet(grid, question, len(chosen), self.timeout)
            if known:
                ids, num = sorted(known), min(len(chosen), len(known))
                places = stream(self.seed, "clients", round_ - 1).choice(len(ids), num, replace=False)
                chosen = [known[ids[place]] for place in sorted(places)]
        self._asked = chosen
        return self._delivery.messages(drafts[0], orders, chosen)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the uploads that can be added; the round goes on without the rest."""
        round_ = server_round + self._rounds_before
        followed = self._delivery.heard(replies)
        uploads, dropped = read_replies(followed, self._rules, round_ - 1, self._w, self._nodes.clients)
        for drop in dropped:
            client = self._nodes.clients.get(drop.node, "of unknown number")
            log(WARNING, "fedbat: round %s drops node %s, client %s: %s", round_, drop.node, client, drop.reason)
        answered = {upload.reply.metadata.src_node_id for upload in uploads} | {drop.node for drop in dropped}
        missing = [node for node in self._asked if node not in answered]
        for node in missing:
            client = self._nodes.clients.get(node, "of unknown number")
            log(WARNING, "fedbat: round %s goes on without node %s, client %s: no reply", round_, node, client)
        counts = traffic(uploads, dropped)
        counts |= {"fedbat-missing": len(missing), "fedbat-unknown": self._nodes.num_unknown}
        counts["fedbat-downlink-bytes"] = self._delivery.num_bytes
        asked, self._asked = self._asked, []
        if not uploads:
            log(WARNING, "fedbat: round %s has no upload to add; the model stays as it is", round_)
            self._in_vain += bool(asked)
            if self._in_vain == _TOO_OFTEN:
                log(ERROR, _IN_VAIN, _TOO_OFTEN, commonest(dropped))
            return None, MetricRecord(counts)
        self._in_vain, carried = 0, Carried(self.strategy)
        if isinstance(self.strategy, COMPARING):
            log(INFO, "fedbat: %s needs %s dense models", type(self.strategy).__name__, len(uploads))
            tensors, metrics = self._compare(round_, uploads)
        else:
            tensors, metrics = self._mean(round_, uploads)
        if tensors is None:
            log(WARNING, "fedbat: in round %s %s keeps the model as it is", round_, type(self.strategy).__name__)
            return None, MetricRecord(dict(metrics) | counts)
        if (spoiled := not_finite(tensors, self._w) or carried.spoiled()) is not None:
            carried.restore()
            log(
                ERROR, "fedbat: round %s would bring NaN or infinity into %s; the model stays as it is", round_, spoiled
            )
            return None, MetricRecord(dict(metrics) | counts)
        self._w, self._past = tensors, averaged(self._past, tensors, self.average)
        self._delivery.go_on(tensors)
        if self._checkpoint is not None:
            models = {"model": tensors, "average": self._past, "public": self._delivery.sending.to_tensors()}
            self._checkpoint.save(round_, models, self.strategy, self._settings)
        return record_of_tensors(tensors), MetricRecord(dict(metrics) | counts)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send nothing unless asked for: evaluation is a second download of the model."""
        if not self.evaluate_on_clients:
            return []
        round_ = server_round + self._rounds_before
        drafts = list(self.strategy.configure_evaluate(round_, arrays, config, grid))
        if not drafts:
            return self._delivery.nothing()
        check_drafts(drafts, arrays)
        nodes = [draft.metadata.dst_node_id for draft in drafts]
        return self._delivery.messages(drafts[0], self._orders(round_), nodes)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Aggregate as the strategy inside does."""
        round_ = server_round + self._rounds_before
        replies, odd = read_scores(self._delivery.heard(replies), self._rules)
        for node, reason in odd.items():
            log(WARNING, "fedbat: the evaluation of round %s drops node %s: %s", round_, node, reason)
        found = self.strategy.aggregate_evaluate(round_, replies)
        return (
            None if found is None else MetricRecord(dict(found) | {"fedbat-downlink-bytes": self._delivery.num_bytes})
        )

    def summary(self) -> None:
        """Log the settings, those of the strategy inside included."""
        sent = ", ".join(f"{key}={value}" for key, value in self.method.settings().items())
        log(INFO, "\t├──> %s, compressed by %s (%s)", type(self.strategy).__name__, type(self.method).__name__, sent)
        log(INFO, "\t├──> %s down, average %s, seed %s, timeout %s s", self.down, self.average, self.seed, self.timeout)
        log(INFO, "\t├──> max_ratio %s, max_examples %g", self._rules.max_ratio, self._rules.max_examples)
        if self.seed is not None and is_own(self.strategy, "configure_train"):
            log(WARNING, "fedbat: nodes are sampled by the seed; with seed=None your configure_train chooses them")
        if is_own(self.strategy, "aggregate_train") and not isinstance(self.strategy, COMPARING):
            log(WARNING, _ONE_REPLY, type(self.strategy).__name__)
        if cast(Any, self.strategy).fraction_evaluate and not self.evaluate_on_clients:
            log(WARNING, _NO_EVALUATION, cast(Any, self.strategy).fraction_evaluate)
        self.strategy.summary()

    @property
    def _settings(self) -> dict[str, Any]:
        """What a run should go on with as it began, in the form in which JSON gives it back."""
        method = {"method": type(self.method).__name__, **self.method.settings()}
        inside = type(self.strategy).__name__
        told = {"strategy": inside, "method": method, "down": self.down, "average": self.average, "seed": self.seed}
        told |= {"layout": self.layout.hash.hex(), "keep_frozen": bool(self._kept)}
        return cast(dict[str, Any], json.loads(json.dumps(told)))

    @property
    def received(self) -> ArrayRecord:
        """The model as the next clients get it."""
        return record_of_tensors(self._delivery.received)

    @property
    def averaged(self) -> ArrayRecord | None:
        """The averaged model; None before the first round, or if none is kept."""
        return record_of_tensors(self._past) if self._past else None

    def _begin(self, w: Tensors, public: Tensors) -> None:
        check_model(w, self._whole, self.layout)
        manifest = Manifest.of(self._whole, w, self._tied, self._kept)
        sending = SENDING[self.down](manifest.layout, manifest.moving(w), public)
        self._begun = Delivery(sending, manifest, self._nodes, self.timeout)

    @property
    def _delivery(self) -> Delivery:
        if self._begun is None:
            raise ConfigError("there is no model before `start`, which gives the first; ask for it in evaluate_fn")
        return self._begun

    def _orders(self, round_: int) -> Orders:
        layout, manifest = self._delivery.sending.layout_text, self._delivery.manifest
        return Orders(
            round_ - 1, self.method, self.roles, self.seed, self._training, layout, manifest.told_names, manifest.hash
        )

    @property
    def _weight_key(self) -> str:
        return str(cast(Any, self.strategy).weighted_by_key)

    def _new_sum(self) -> Aggregator:
        return Aggregator(self.method, self.layout, self._w, self._delivery.received)

    def _mean(self, round_: int, uploads: list[Upload]) -> tuple[Tensors | None, MetricRecord]:
        aggregator = self._new_sum()
        for upload in uploads:
            aggregator.add(upload.payload, upload.weight)
        contents = [upload.reply.content for upload in uploads]
        metrics = cast(Any, self.strategy).train_metrics_aggr_fn(contents, self._weight_key)
        mean = aggregator.result()
        reply = self._reply(uploads[0].reply, mean, {self._weight_key: aggregator.total_weight})
        with metrics_known(self.strategy, metrics):
            return self._given_to_the_strategy(round_, [reply], mean)

    def _compare(self, round_: int, uploads: list[Upload]) -> tuple[Tensors | None, MetricRecord]:
        """Give the strategy one dense model per client; buffers are averaged all the same."""
        everyone, replies = self._new_sum(), []
        for upload in uploads:
            alone = self._new_sum()
            for aggregator in (everyone, alone):
                aggregator.add(upload.payload, upload.weight)
            metrics = next(iter(upload.reply.content.metric_records.values()))
            replies.append(self._reply(upload.reply, alone.result(), dict(metrics)))
        return self._given_to_the_strategy(round_, replies, everyone.result())

    def _given_to_the_strategy(
        self, round_: int, replies: list[Message], mean: Tensors
    ) -> tuple[Tensors | None, MetricRecord]:
        """Let the strategy update parameters; buffers (running means, counters) are averaged, in their own types.

        None if it keeps the old model, as Bulyan does when too few clients answered.
        """
        arrays, metrics = self.strategy.aggregate_train(round_, replies)
        if arrays is None:
            return None, metrics or MetricRecord()
        given = tensors_of_record(arrays)
        check_result(self.strategy, given, self._w)
        new = self._w | mean
        new |= {name: tensor.to(self._w[name].dtype) for name, tensor in given.items()}
        # Frozen tensors stay bit for bit: a strategy's mean of equal values may be off by a rounding error.
        new |= {name: self._w[name] for name in self._frozen & self._w.keys()}
        new |= {name: new[first].clone() for name, first in self._tied.items()}
        return {name: new[name] for name in self._w}, metrics or MetricRecord()

    def _reply(self, reply: Message, model: Tensors, metrics: dict[str, Any]) -> Message:
        """A client's reply as the strategy inside knows it."""
        arrays = self._parameters_of(self._w | model)
        reply.content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
        return reply

    def _parameters_of(self, tensors: Tensors) -> ArrayRecord:
        return record_of_tensors({name: tensor for name, tensor in tensors.items() if name in self._parameters})
