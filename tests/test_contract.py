"""Mistakes in a method of one's own: told by name, before a server or an engine stumbles over them."""

import re
from dataclasses import dataclass, replace

import pytest
import torch

from fedbat import METHODS, ConfigError, MethodError, begin, make_method
from fedbat.binarize import mean_abs
from fedbat.contract import check_method
from fedbat.levels import Levels, OddLevels
from fedbat.method import Forward, Method
from fedbat.methods.ef_signsgd import EFSignSGD
from fedbat.methods.fedbat import FedBAT
from fedbat.parts import Dense, Kind, Signs, Sparse
from fedbat.seeded_parts import RotatedSigns
from tests.local_training import mlp, run, some_batches


class Own(Method):
    """Signs; each test spoils one thing."""

    kinds = (Kind(Signs),)

    def encode(self, w, local, memory, noise):
        return {name: Signs.of(m > 0, mean_abs(m)) for name, m in local.update.items()}, memory


def trained(method):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with begin(method, model, optimizer, 2, memory={}) as local:
        run(model, optimizer, some_batches(2))
        return local.finish()


def own(**changes):
    return type("Mine", (Own,), changes)()


def encoding(change):
    """A method whose `encode` gives what `change` makes of the right (parts, memory)."""
    return own(encode=lambda self, *given: change(*Own.encode(self, *given)))


def first(parts, part):
    return {**parts, next(iter(parts)): part}


def test_a_method_that_does_as_it_says_is_left_alone():
    assert trained(own()).payload.parts
    for name in METHODS:
        check_method(make_method(name))


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (encoding(lambda parts, memory: parts), "Mine.encode gave a dict, expected (parts, memory)"),
        (encoding(lambda parts, memory: (parts, None)), "gave a tuple, expected (parts, memory), two dictionaries"),
        (encoding(lambda parts, memory: ({}, memory)), "gave parts for [], expected one for each of"),
        (encoding(lambda parts, memory: (first(parts, Dense(torch.ones(3))), memory)), "gave kind 0 (Dense) with"),
        (own(kinds=(Kind(Levels, 4),), encode=lambda self, *given: make_method("fedpaq", bits=3).encode(*given)),
         "gave kind 2 (Levels) with parameter 3 for 0.weight, expected kind 2 (Levels) with parameter 4"),
        (encoding(lambda parts, memory: (first(parts, Signs.of(torch.ones(3) > 0, torch.tensor(1.0))), memory)),
         "gave 3 values for"),
        (encoding(lambda parts, memory: (parts, {"a": 1.0})), "gave a memory with a float for a, expected tensors"),
        (encoding(lambda parts, memory: (parts, {"a": torch.ones(1)})), "gave a memory, but `remembers` is False"),
        (own(remembers=True), "gave no memory, but `remembers` is True"),
        (own(step_bounds=(1.0, 2.0)), "outside its step_bounds from 1 to 2"),
        (own(alters_forward=lambda self, step: True, forward=lambda self, w, local, u: dict(w)),
         "Mine.forward gave a dict, expected Forward(weights)"),
        (own(alters_forward=lambda self, step: True, forward=lambda self, w, local, u: Forward({})),
         "Mine.forward gave weights for [], expected them for"),
        (own(alters_forward=lambda self, step: True,
             forward=lambda self, w, local, u: Forward({name: x[:1] for name, x in w.items()})),
         "Mine.forward gave weights of shape [1, 12] for 0.weight, expected [16, 12]"),
        (own(learnables=lambda self, w: {"pace": torch.zeros(())}),
         "Mine.learnables names pace, expected names of layers"),
    ],
)  # fmt: skip
def test_what_a_method_gives_is_checked(method, sentence):
    with pytest.raises(MethodError, match=re.escape(sentence)):
        trained(method)


def making(part):
    """A method that makes its parts of any kind from m by `part`."""

    def encode(self, w, local, memory, noise):
        return {name: part(m) for name, m in local.update.items()}, memory

    return own(kinds=(Kind(Signs), Kind(Dense), Kind(Sparse, None), Kind(Levels, 4), Kind(OddLevels, 2)), encode=encode)


def strewn(m, positions, values=None):
    flat = m.reshape(-1)
    return Sparse(positions(flat), flat[positions(flat)] if values is None else values, m.numel())


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (lambda m: Signs.of(m.sign(), mean_abs(m)),
         "signs as torch.float32 of shape [16, 12], expected a boolean tensor, such as m > 0"),
        (lambda m: Signs.of((m > 0).numpy(), mean_abs(m)), "signs as the ndarray array([["),
        (lambda m: Signs.of(m > 0, 0.01), "a scale as the float 0.01, expected one number for the layer, a tensor"),
        (lambda m: Signs.of(m > 0, m.abs().mean(0)), "a scale as torch.float32 of shape [12], expected one number"),
        (lambda m: RotatedSigns.of(m > 0, 1.0, torch.tensor(1)), "a scale as the float 1.0, expected one number"),
        (lambda m: Levels.of(m.sign(), mean_abs(m), 9), "Levels of width 9, expected 2 to 8 bits; for one bit use"),
        (lambda m: Levels.of(m.sign(), mean_abs(m), 1), "Levels of width 1, expected 2 to 8 bits; for one bit use"),
        (lambda m: Levels.of(m.sign(), 1, 4), "a scale as the int 1, expected one number"),
        (lambda m: Levels.of(m / m.abs().max(), m.abs().max(), 4), "levels with fractions, expected whole numbers: r"),
        (lambda m: Levels.of(m.sign() * 8, mean_abs(m), 4), "levels from -8 to 8, expected -7 to 7; clamp or scale"),
        (lambda m: Levels.of(m.sign().int() * 300, mean_abs(m), 4), "levels from -300 to 300, expected -7 to 7"),
        (lambda m: OddLevels.of(7 * (m > 0), mean_abs(m), 2), "levels from 0 to 7, expected 0 to 3; clamp"),
        (lambda m: OddLevels.of(m.sign(), mean_abs(m), 2), "levels from -1 to 1, expected 0 to 3; clamp"),
        (lambda m: OddLevels.of(m > 0, mean_abs(m), 5), "OddLevels of width 5, expected 2 to 4 bits"),
        (lambda m: OddLevels(torch.full((m.numel(),), 7, dtype=torch.uint8), mean_abs(m), 2),
         "gave OddLevels for 0.weight with level code 7, expected at most 3"),
        (lambda m: Dense(m), "gave Dense for 0.weight with values as torch.float32 of shape [16, 12], expected"),
        (lambda m: Dense(m.reshape(-1).double()), "with values as torch.float64 of shape [192], expected them flat"),
        (lambda m: strewn(m, lambda x: x.abs().topk(9).indices.sort(descending=True).values),
         "gave Sparse for 0.weight with positions that do not ascend within 0 to 191, expected flat ones, sorted: "),
        (lambda m: strewn(m, lambda x: torch.tensor([3, 3])), "positions that do not ascend within 0 to 191"),
        (lambda m: strewn(m, lambda x: torch.tensor([3, 192]), torch.ones(2)), "do not ascend within 0 to 191"),
        (lambda m: strewn(m, lambda x: torch.tensor([-1, 3])), "do not ascend within 0 to 191"),
        (lambda m: strewn(m, lambda x: torch.tensor([1, 3]), torch.ones(3)),
         "with positions as torch.int64 of shape [2] and values as torch.float32 of shape [3], expected equally many"),
        (lambda m: strewn(m, lambda x: x > 0), "with positions as torch.bool of shape [192] and values as"),
    ],
)  # fmt: skip
def test_parts_are_checked_where_they_are_made(part, sentence):
    with pytest.raises(MethodError, match=rf"^Mine\.encode.*{re.escape(sentence)}"):
        trained(making(part))


def test_parts_of_a_diverged_round_are_no_mistake_of_the_method():
    """The server tells whose training diverged."""
    nan = torch.full((2000,), torch.nan)
    assert Levels.of(nan, nan[0], 4).numel == OddLevels.of(nan, nan[0], 2).numel == 2000


@pytest.mark.parametrize("kinds", [(Signs,), Kind(Signs), Signs, ("signs",)])
def test_kinds_are_kinds(kinds):
    with pytest.raises(ConfigError, match=re.escape("Mine.kinds is ") + ".*" + re.escape("such as (Kind(Signs),)")):
        trained(own(kinds=kinds))


def test_a_part_of_ones_own_is_registered():
    class Louder(Signs):
        KIND = 224

    class Quieter(Signs):  # servers would take it for Signs
        pass

    for part in (Louder, Quieter):
        with pytest.raises(ConfigError, match=rf"Mine.kinds has {part.__name__}, .* call fedbat.wire.register\("):
            trained(own(kinds=(Kind(part),)))


def test_what_was_left_out_must_be_given_back():
    """The old memory instead of the new one would be no error feedback at all."""

    class Forgetful(EFSignSGD):
        def encode(self, w, local, memory, noise):
            return super().encode(w, local, memory, noise)[0], memory

    with pytest.raises(MethodError, match=r"Forgetful\.encode gave no memory"):
        trained(Forgetful())


def test_a_default_without_a_type_is_none():
    @dataclass(frozen=True)
    class Slow(FedBAT):
        rho = 2.0

    assert Slow().rho == 6.0  # what dataclasses make of it
    with pytest.raises(ConfigError, match=re.escape("Slow sets rho without a type, so that it stays 6; write rho: ")):
        trained(Slow())

    @dataclass(frozen=True)
    class Right(FedBAT):
        rho: float = 2.0

    check_method(Right())


def test_a_closed_form_belongs_to_its_forward_pass():
    class Doubled(FedBAT):
        def forward(self, w, local, u):
            seen = super().forward(w, local, u)
            return replace(seen, weights={name: 2 * x for name, x in seen.weights.items()})

    with pytest.raises(ConfigError, match="Doubled has a forward of its own, but the pull_back of FedBAT"):
        trained(Doubled())

    class ByAutograd(Doubled):
        pull_back = Method.pull_back

    check_method(ByAutograd())
