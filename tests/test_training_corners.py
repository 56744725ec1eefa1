"""Corners of local training: short and long loops, layers that do not move, moved late, or frozen."""

import pytest
import torch
from torch import nn

from fedbat import METHODS, Server, begin, make_method
from fedbat.methods.fedbat import FedBAT
from fedbat.streams import UniformNoise
from tests.local_training import finish, holds_one_magnitude, mlp, run, some_batches


def test_phi_one_binarizes_at_the_end_with_mean_abs():
    upload, *_ = finish(FedBAT(phi=1, bounds=None), 8, 8)
    twin, *_ = finish(make_method("fedavg"), 8, 8)
    for name, part in upload.payload.parts.items():
        m = twin.payload.parts[name].unpack()
        assert part.step == pytest.approx(m.abs().mean().item(), rel=1e-6)


def test_loop_shorter_than_announced_ends_inside_the_warm_up():
    short, *_ = finish(FedBAT(phi=0.5, bounds=None), 100, 8)
    full, *_ = finish(FedBAT(phi=1, bounds=None), 8, 8)
    assert [p.step for p in short.payload.parts.values()] == [p.step for p in full.payload.parts.values()]


def test_loop_longer_than_announced_goes_on_binarized():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = begin(FedBAT(phi=0.5), model, optimizer, 4)
    run(model, optimizer, some_batches(12))
    assert holds_one_magnitude(model, local) and local.finish().num_steps == 12


def test_no_step_at_all_sends_zero():
    upload, model, start, _ = finish(FedBAT(), 10, 0)
    assert all(part.step == 0 for part in upload.payload.parts.values())
    for name, tensor in start.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


@pytest.mark.parametrize("step", ["learned", "fixed", "inf-norm"])
def test_tau_one_and_phi_zero_start_from_an_update_of_zero(step):
    upload, *_ = finish(FedBAT(phi=0, step=step, bounds=None), 1, 1)
    plain, *_ = finish(make_method("fedavg"), 1, 1)
    for name, part in upload.payload.parts.items():
        m = plain.payload.parts[name].unpack()  # S was 0 in the only forward pass: the step is FedAvg's
        expected = m.abs().max() if step == "inf-norm" else m.abs().mean()
        assert part.step == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_layer_that_never_moves_is_left_alone(name):
    """Unused in the forward pass, hence without gradient; the authors' lower bound would send random +-5e-4."""

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = mlp(), nn.Linear(7, 5)

        def forward(self, x):
            return self.used(x)

    torch.manual_seed(0)
    upload, model, start, _ = finish(make_method(name), 6, 6, model=Unused())
    w = start.unused.weight
    expected = w.sign() * w.abs().mean() if name == "bifl" else w  # binary weights are what BiFL sends
    torch.testing.assert_close(model.unused.weight, expected, rtol=1e-6, atol=0)
    if not make_method(name).sends_weights:
        assert not upload.payload.parts["unused.weight"].unpack().any()
    server = Server(make_method(name), start)
    server.add(upload.to_bytes(), weight=1)  # which refuses a step size of minus zero
    server.step()
    torch.testing.assert_close(start.unused.weight, expected, rtol=1e-6, atol=0)


def test_a_layer_that_starts_to_move_late_gets_its_step_size_then():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.late, self.on = mlp(), nn.Linear(12, 3), False

        def forward(self, x):
            return self.used(x) + self.late(x) if self.on else self.used(x)

    model = Late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = begin(FedBAT(phi=0.2), model, optimizer, 10)
    names = [entry.name for entry in local.layout.compressed]
    late = names.index("late.weight")
    run(model, optimizer, some_batches(5))
    assert local._local.fixed["alpha_prime"][late] == 0
    model.on = True
    run(model, optimizer, some_batches(1))
    set_then = local._local.fixed["alpha_prime"].clone()
    assert (set_then > 0).all()
    run(model, optimizer, some_batches(4))
    assert torch.equal(local._local.fixed["alpha_prime"], set_then)


def test_last_bits_without_a_binarized_pass_are_fresh_and_after_a_pass_at_zero_are_nothing():
    ended_in_warm_up, *_ = finish(FedBAT(phi=1, sent="last"), 5, 5)
    assert all(part.step > 0 for part in ended_in_warm_up.payload.parts.values())
    one_step, *_ = finish(FedBAT(phi=0, sent="last"), 1, 1)
    assert all(part.step == 0 for part in one_step.payload.parts.values())


def test_fixed_step_is_rho_zero_bit_for_bit():
    fixed, *_ = finish(FedBAT(step="fixed"), 8, 8, noise=UniformNoise(1, "x"))
    rho0, *_ = finish(FedBAT(rho=0), 8, 8, noise=UniformNoise(1, "x"))
    assert fixed.to_bytes() == rho0.to_bytes()


def test_last_bits_are_those_of_the_last_forward_pass():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = begin(FedBAT(phi=0.5, sent="last"), model, optimizer, 6)
    start = {k: v.clone() for k, v in local._w.items()}
    batches = some_batches(6)
    run(model, optimizer, batches[:5])
    seen = {k: dict(model.named_parameters())[k].detach().clone() for k in start}  # what the sixth forward will use
    run(model, optimizer, batches[5:])
    upload = local.finish()
    for name, part in upload.payload.parts.items():
        sent = part.unpack().view(seen[name].shape)
        assert torch.equal(start[name] + sent, seen[name])


def test_frozen_layer_is_not_sent():
    model = mlp()
    model[0].weight.requires_grad_(False)
    upload, after, start, _ = finish(FedBAT(), 8, 8, model=model)
    assert "0.weight" not in upload.payload.parts and torch.equal(after[0].weight, start[0].weight)
