"""Mistakes in a method of one's own: told by name, before a server or an engine stumbles over them."""

import re
from dataclasses import dataclass, replace

import pytest
import torch

from fedbat import METHODS, ConfigError, MethodError, begin, make_method
from fedbat.binarize import mean_abs
from fedbat.contract import check_method
from fedbat.levels import Levels
from fedbat.method import Forward, Method
from fedbat.methods.ef_signsgd import EFSignSGD
from fedbat.methods.fedbat import FedBAT
from fedbat.parts import Dense, Kind, Signs
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
