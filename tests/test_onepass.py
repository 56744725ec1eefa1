"""FedBAT's compiled passes say what its tensor code says."""

import os
import subprocess
import sys

import numba
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedbat
from fedbat import FedBAT, SignSGD, begin
from fedbat.method import Local
from fedbat.onepass import OnePass, compiled
from fedbat.streams import UniformNoise

SHAPES = {"conv": (16, 8, 3, 3), "point": (8, 16, 1, 1), "linear": (10, 37), "one": (1, 1)}


def tensors(scale, seed=0, shapes=SHAPES):
    rng = torch.Generator().manual_seed(seed)
    values = {name: scale * torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    return {n: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for n, x in values.items()}


def noise():
    return UniformNoise(1, "noise", 2, 3)


def local_of(method, w, live):
    local = Local({name: live[name] - w[name] for name in w}, method.learnables(w))
    local.fixed = method.prepare(w, local)
    for i, value in enumerate(local.learned.values()):
        value += 0.05 * i
    return local


class Halved(UniformNoise):
    """Noise of one's own."""

    def __call__(self, like):
        return {name: 0.5 * u for name, u in super().__call__(like).items()}


@pytest.fixture
def anew():
    """As in a process that has compiled nothing."""

    def forget():
        compiled.cache_clear()
        sys.modules.pop("fedbat.loops", None)
        vars(fedbat).pop("loops", None)

    forget()
    yield
    forget()


def test_it_is_tried_here():
    """Else nothing below would say anything of it."""
    assert compiled() is not None


def test_words_are_the_floats_drawn_in_their_place():
    w = tensors(1.0)
    words, floats = noise().words(w), noise()(w)
    for name, u in floats.items():
        in_memory = u.as_strided((u.numel(),), (1,))
        assert torch.equal((words[name].double() + 0.5) / 2**16 + 0.5, in_memory.double())


@pytest.mark.parametrize("method", [FedBAT(), FedBAT(bounds=None), FedBAT(rho=0), FedBAT(bounds=(1e-4, 3e-3))], ids=str)
def test_a_step_is_the_methods_own(method):
    w, m, grad = tensors(0.05), tensors(4e-3, seed=1), tensors(1.0, seed=2)
    live = {name: w[name] + m[name] for name in w}
    local = local_of(method, w, live)
    ours, u = OnePass.of(method, w, live, noise()), noise()(w)
    assert ours is not None and ours.ready(local)
    words = ours.draw()
    seen, expected = ours.forward(w, local, words), method.forward(w, local, u)
    for name in w:
        assert torch.equal(seen.weights[name], expected.weights[name]), name
    del grad["point"]  # a layer that took no part
    grad["conv"] = grad["conv"].contiguous()  # a gradient that lies otherwise
    true, true_learned = method.pull_back(w, local, u, expected, grad)
    given = {name: x.clone() for name, x in grad.items()}
    grads, learned = ours.pull_back(w, local, words, seen, grad)
    assert all(torch.equal(grad[name], x) for name, x in given.items())  # the user's own
    assert grads.keys() == true.keys() and learned.keys() == true_learned.keys()
    for name in grads:
        assert torch.equal(grads[name], true[name]), name
    for name in learned:
        torch.testing.assert_close(learned[name], true_learned[name], rtol=1e-5, atol=1e-6)


def test_it_follows_memory_that_moves():
    """Other processes may be given the model in the middle of a round."""
    w, m = tensors(0.05), tensors(4e-3, seed=1)
    live = {name: w[name] + m[name] for name in w}
    method = FedBAT()
    local, ours, words = local_of(method, w, live), OnePass.of(method, w, live, noise()), noise().words(w)
    assert ours is not None
    before = {name: x.clone() for name, x in ours.forward(w, local, words).weights.items()}
    for name, x in live.items():
        x.share_memory_()
        w[name].untyped_storage().resize_(4 * x.numel() + 64)
    for name, x in ours.forward(w, local, words).weights.items():
        assert torch.equal(x, before[name])


def test_gradients_of_another_type_are_taken():
    w, method = tensors(0.05), FedBAT()
    live = {name: x + 1e-3 for name, x in w.items()}
    local, ours = local_of(method, w, live), OnePass.of(method, w, live, noise())
    assert ours is not None
    words = ours.draw()
    grad = tensors(1.0, seed=2)
    seen = ours.forward(w, local, words)
    true, _ = ours.pull_back(w, local, words, seen, grad)
    same, _ = ours.pull_back(w, local, words, seen, {name: x.double() for name, x in grad.items()})
    assert all(torch.equal(same[name], x) for name, x in true.items())


def test_a_layer_without_weights_is_no_trouble():
    w = {"none": torch.zeros(0, 4), "some": torch.zeros(2, 4)}
    live = {"none": w["none"], "some": w["some"] + 1e-3}
    method = FedBAT()
    local, ours = local_of(method, w, live), OnePass.of(method, w, live, noise())
    assert ours is not None
    seen = ours.forward(w, local, words := ours.draw())
    grads, _ = ours.pull_back(w, local, words, seen, {name: torch.ones_like(x) for name, x in w.items()})
    assert seen.weights["none"].shape == grads["none"].shape == (0, 4)


def test_the_edge_is_certain_and_counts_as_inside():
    """At |m| = alpha the sign is certain (Eq. 7) and the gradient passes (Eq. 8); just beyond, it does not pass."""
    w = {"x": torch.zeros(4)[None]}
    alpha = torch.tensor(0.01)
    beyond = torch.nextafter(alpha, torch.tensor(1.0))
    live = {"x": torch.stack([alpha, -alpha, beyond, -beyond])[None]}
    method = FedBAT(bounds=(alpha.item(), alpha.item()))
    local = local_of(method, w, live)
    ours = OnePass.of(method, w, live, noise())
    assert ours is not None
    for _ in range(2000):
        words = ours.draw()
        seen = ours.forward(w, local, words)
        assert torch.equal(seen.weights["x"], alpha * torch.tensor([[1.0, -1.0, 1.0, -1.0]]))
    grads, _ = ours.pull_back(w, local, words, seen, {"x": torch.ones(1, 4)})
    assert grads["x"].tolist() == [[1, 1, 0, 0]]


@pytest.mark.parametrize("phi", [0.0, 0.4])
def test_a_round_with_it_is_a_round_without(phi, monkeypatch):
    """The same noise, so the same signs, but for those that the last digits of alpha decide."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    model = model.to(memory_format=torch.channels_last)
    start = {name: x.clone() for name, x in model.state_dict().items()}
    x = torch.randn(20, 16, 1, 8, 8).to(torch.float32)
    y = torch.randint(0, 4, (20, 16))
    uploads, fast = [], []
    for with_it in (True, False):
        if not with_it:
            monkeypatch.setattr(OnePass, "of", lambda *_: None)
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with begin(FedBAT(phi=phi), model, optimizer, len(x), noise=noise()) as local:
            for batch, labels in zip(x, y, strict=True):
                optimizer.zero_grad()
                F.cross_entropy(model(batch), labels).backward()
                optimizer.step()
                fast.append(isinstance(local._by, OnePass))
            uploads.append(local.finish())
    assert any(fast[: len(x)]) and not any(fast[len(x) :])
    ours, theirs = (upload.payload.parts for upload in uploads)
    for name, part in ours.items():
        assert part.step.item() == pytest.approx(theirs[name].step.item(), rel=1e-3)
        assert (part.unpack().sign() == theirs[name].unpack().sign()).float().mean() > 0.99


@pytest.mark.parametrize(
    "method", [FedBAT(bits=2), FedBAT(step="inf-norm"), FedBAT(sent="last"), SignSGD()], ids=str
)  # fmt: skip
def test_other_methods_compute_for_themselves(method):
    w = tensors(1.0)
    assert OnePass.of(method, w, w, noise()) is None


def test_a_methods_variant_computes_for_itself():
    class Mine(FedBAT):
        def forward(self, w, local, u):
            raise NotImplementedError

    w = tensors(1.0)
    assert OnePass.of(Mine(), w, w, noise()) is None


def test_other_tensors_and_other_noise_are_left_to_the_method():
    w, method = tensors(1.0), FedBAT()
    double = {name: x.double() for name, x in w.items()}
    gaps = {"x": torch.zeros(8, 8)[:, ::2]}
    otherwise = {name: x.contiguous() for name, x in w.items()}
    assert OnePass.of(method, w, w, noise()) is not None
    assert OnePass.of(method, double, double, noise()) is None
    assert OnePass.of(method, gaps, gaps, noise()) is None
    assert OnePass.of(method, w, otherwise, noise()) is None
    assert OnePass.of(method, w, w, lambda like: like) is None
    assert OnePass.of(method, w, w, Halved(1, "noise")) is None


def test_without_numba_the_method_computes_for_itself(monkeypatch, anew):
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it were not there
    w = tensors(1.0)
    assert OnePass.of(FedBAT(), w, w, noise()) is None


def test_a_numba_that_is_told_not_to_compile_is_left_alone(monkeypatch, anew):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    assert compiled() is None


def test_a_numba_that_does_not_work_is_said_once(monkeypatch, anew):
    def njit(*args, **options):
        raise OSError("no space left")

    monkeypatch.setattr(numba, "njit", njit)
    with pytest.warns(UserWarning, match="Numba does not work here.*no space left"):
        assert compiled() is None
    assert compiled() is None


def test_where_nothing_can_be_kept_it_is_compiled_anew(monkeypatch, anew):
    true = numba.njit

    def njit(*args, cache, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return true(*args, **options)

    monkeypatch.setattr(numba, "njit", njit)
    assert compiled() is not None


def test_the_next_process_finds_what_was_compiled(tmp_path):
    code = "from fedbat.onepass import compiled; f = compiled().pull_back; print(len(f.stats.cache_hits))"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    found, files = [], []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        found.append(int(done.stdout))
        files.append(len(list(tmp_path.rglob("*.nbc"))))
    assert found == [0, 1, 1] and len(set(files)) == 1
