"""Aggregation: the weighted mean of what was decoded, layer by layer."""

import copy
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from fedbat import Aggregator, ConfigError, MethodError, Payload, Server, WireError, begin, layout_of, make_method
from fedbat.layout import tensors_of
from fedbat.parts import Signs


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False))


def random_payload(layout, rng):
    parts = {
        e.name: Signs.of(torch.rand(e.numel, generator=rng) < 0.5, torch.rand((), generator=rng) * 0.01)
        for e in layout.compressed
    }
    rest = {
        e.name: torch.randint(0, 9, e.shape, generator=rng) if e.role == "max" else torch.randn(e.shape, generator=rng)
        for e in layout.rest
    }
    return Payload(layout, parts, rest)


def test_mean_of_signs_is_equation_11(rng):
    model = small()
    layout = layout_of(model)
    w = tensors_of(model, layout)
    payloads = [random_payload(layout, rng) for _ in range(7)]
    weights = [int(x) for x in torch.randint(10, 900, (7,), generator=rng)]
    shares = [x / sum(weights) for x in weights]
    aggregator = Aggregator(make_method("fedbat"), layout, w)
    for payload, weight in zip(payloads, weights, strict=True):
        aggregator.add(Payload.from_bytes(payload.to_bytes(), layout), weight)
    result = aggregator.result()
    for entry in layout.compressed:
        alphas = [p.parts[entry.name].scale.double() for p in payloads]
        bits = [p.parts[entry.name].unpack().sign().double() for p in payloads]
        mean = sum(share * a * b for share, a, b in zip(shares, alphas, bits, strict=True)).view(entry.shape)
        torch.testing.assert_close(result[entry.name].double(), w[entry.name].double() + mean, rtol=0, atol=1e-7)
        assert ((result[entry.name] - w[entry.name]).abs() <= max(alphas) + 1e-7).all()
    for entry in layout.rest:
        values = [p.rest[entry.name] for p in payloads]
        if entry.role == "max":
            assert (
                torch.equal(result[entry.name], torch.stack(values).amax(0)) and result[entry.name].dtype == entry.dtype
            )
        else:
            mean = sum(s * v.double() for s, v in zip(shares, values, strict=True))
            torch.testing.assert_close(result[entry.name].double(), w[entry.name].double() + mean, rtol=0, atol=1e-5)


def test_order_does_not_matter_beyond_rounding(rng):
    model = small()
    layout = layout_of(model)
    w = tensors_of(model, layout)
    payloads = [random_payload(layout, rng) for _ in range(3)]
    results = []
    for order in itertools.permutations(range(3)):
        aggregator = Aggregator(make_method("signsgd"), layout, w)
        for k in order:
            aggregator.add(payloads[k], k + 1)
        results.append(aggregator.result())
    for other in results[1:]:
        for name in w:
            torch.testing.assert_close(other[name], results[0][name], rtol=1e-6, atol=1e-6)


def test_integer_buffers_keep_the_maximum_of_server_and_clients():
    model = small()
    layout = layout_of(model)
    model[1].num_batches_tracked.fill_(100)
    w = {k: v.clone() for k, v in tensors_of(model, layout).items()}
    local_models = []
    for steps in (3, 5):
        client = small()
        client.load_state_dict(model.state_dict())
        optimizer = torch.optim.SGD(client.parameters(), lr=0.1)
        local = begin(make_method("fedbat"), client, optimizer, steps)
        for _ in range(steps):
            optimizer.zero_grad()
            client(torch.randn(8, 9)).sum().backward()
            optimizer.step()
        local_models.append(local.finish())
    server = Server(make_method("fedbat"), model)
    for upload in local_models:
        server.add(upload.to_bytes(), 1)
    server.step()
    assert model[1].num_batches_tracked.item() == 105 and model[1].num_batches_tracked.dtype == torch.int64
    assert not torch.equal(model[0].weight, w["0.weight"])


def test_server_refuses_nonsense():
    model = small()
    server = Server(make_method("fedbat"), model)
    with pytest.raises(WireError):
        server.add(b"hello", 1)
    with pytest.raises(MethodError, match="no upload"):
        server.step()
    payload = random_payload(server.layout, torch.Generator().manual_seed(0)).to_bytes()
    for weight in (0, -1, float("nan"), float("inf"), 1e39, 1e-60, "many", None):
        with pytest.raises(ConfigError, match="weight="):
            server.add(payload, weight)
    with pytest.raises(MethodError, match="no upload"):  # not even half of one
        server.step()


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.double().float(),
        lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
        lambda model: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
    ],
    ids=["to", "assign", "data"],
)
@pytest.mark.parametrize("name", ["fedbat", "bifl"])
@pytest.mark.parametrize("when", ["before", "between"])
def test_the_model_learns_wherever_its_tensors_were_moved(name, move, when, rng):
    models = small(), small()
    servers = [Server(make_method(name), model) for model in models]
    for round_ in range(2):
        if when == "before":
            move(models[1])
        payload = random_payload(servers[0].layout, rng).to_bytes()
        for server in servers:
            server.add(payload, 3 + round_)
        if when == "between":
            move(models[1])
        for server in servers:
            server.step()
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(models[1].state_dict()[name], tensor), name


def test_uploads_may_be_added_by_several_threads(rng):
    models = [nn.Linear(400, 400, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    servers = [Server(make_method("fedbat"), model) for model in models]
    raws = [random_payload(servers[0].layout, rng).to_bytes() for _ in range(60)]
    for raw in raws:
        servers[0].add(raw, 1)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda raw: servers[1].add(raw, 1), raws))
    for server in servers:
        server.step()
    assert torch.allclose(models[0].weight, models[1].weight, rtol=0, atol=1e-6)
    assert pickle.loads(pickle.dumps(servers[1])).layout == servers[1].layout


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint16, torch.uint32, torch.uint64])
def test_of_every_kind_of_integer_the_largest_is_kept(dtype):
    model = nn.Linear(3, 2)
    model.register_buffer("seen", torch.tensor([1, 0, 1]).to(dtype))
    server, raws = Server(make_method("fedavg"), model), []
    for seen in ([0, 1, 1], [0, 0, 0]):
        client = copy.deepcopy(model)
        client.seen.copy_(torch.tensor(seen).to(dtype))
        raws.append(begin(make_method("fedavg"), client, torch.optim.SGD(client.parameters(), lr=0.1), 1).finish())
    for raw in raws:
        server.add(raw.to_bytes(), 1)
    server.step()
    assert model.seen.dtype == dtype and model.seen.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_many_small_steps_add_up_in_every_precision(dtype):
    """Steps below half of the last digit of 1: rounded after each, they would leave the model where it is."""
    model = nn.Linear(4, 3).to(dtype)
    with torch.no_grad():
        model.weight.fill_(1)
        model.bias.fill_(1)
    server, step = Server(make_method("signsgd"), model), 0.0002

    def learn(num_rounds):
        for _ in range(num_rounds):
            parts = {"weight": Signs.of(torch.ones(12, dtype=torch.bool), torch.tensor(step))}
            server.add(Payload(server.layout, parts, {"bias": torch.full((3,), step)}).to_bytes(), 1)
            server.step()

    learn(500)
    rounding = torch.finfo(dtype).eps + 500 * torch.finfo(torch.float32).eps
    for tensor in (model.weight, model.bias):
        assert tensor.dtype == dtype and (tensor.float() / 1.1 - 1).abs().max() <= rounding
    with torch.no_grad():
        model.weight.fill_(2)  # the user's own hand
    learn(250)
    assert (model.weight.float() / 2.05 - 1).abs().max() <= rounding
    assert (model.bias.float() / 1.15 - 1).abs().max() <= rounding


def test_weights_that_a_method_sends_are_changes_of_the_rounded_model(rng):
    """BiFL's mean of weights is where the model goes; what rounding hid of it before stays hidden in it."""
    model = nn.Linear(40, 30, bias=False).to(torch.bfloat16)
    exact = Server(make_method("bifl"), copy.deepcopy(model).float())
    server = Server(make_method("bifl"), model)
    for _ in range(3):
        payload = random_payload(layout_of(model), rng)
        server.add(payload.to_bytes(), 1)
        server.step()
    mean = payload.parts["weight"].unpack().view(30, 40)
    assert (server._true["weight"] - mean).abs().max() <= 3 * torch.finfo(torch.bfloat16).eps
    assert exact._true["weight"] is exact._live["weight"]


def test_a_round_whose_sum_overflows_is_forgotten_and_the_next_one_counts(rng):
    model = small()
    layout = layout_of(model)
    before = {name: x.clone() for name, x in tensors_of(model, layout).items()}
    server = Server(make_method("signsgd"), model)
    hostile, good = random_payload(layout, rng), random_payload(layout, rng)
    hostile.rest["1.bias"].fill_(3e38)
    server.add(hostile.to_bytes(), weight=1000)
    with pytest.raises(MethodError, match=r"would bring NaN or infinity into 1\.bias; the model is as it was"):
        server.step()
    assert all(torch.equal(x, before[name]) for name, x in tensors_of(model, layout).items())
    server.add(good.to_bytes(), weight=1)
    server.step()
    torch.testing.assert_close(model[1].bias, before["1.bias"] + good.rest["1.bias"])


def test_an_infinity_that_was_in_the_model_stays():
    model = small()
    model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    server = Server(make_method("signsgd"), model)
    optimizer = torch.optim.SGD((net := copy.deepcopy(model)).parameters(), lr=0.1)
    with begin(make_method("signsgd"), net, optimizer, 1) as local:
        net(torch.randn(4, 9)).sum().backward()
        optimizer.step()
        server.add(local.finish().to_bytes(), weight=1)
    server.step()
    assert model.mask.tolist() == [0.0, float("-inf")]


def test_the_model_to_test_has_the_weights_of_the_method_and_is_a_copy():
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 3))
    server = Server(make_method("zerofl", sparsity=0.9), model)
    tested = server.model_to_test()
    kept = tested[2].weight != 0
    assert kept.sum() == 9 and torch.equal(tested[2].weight[kept], model[2].weight[kept])
    assert torch.equal(tested[1].weight, model[1].weight) and (model[2].weight != 0).all()
    assert torch.equal(Server(make_method("fedbat"), model).model_to_test()[0].weight, model[0].weight)
