"""What README and docs say is run and checked."""

import copy
import re
from pathlib import Path

import pytest
import torch

from fedbat import FedAvg, Server, WireError, begin, wire
from fedbat.parts import Reader
from tests import bands
from tests.local_training import mlp, run, some_batches

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_example_runs_as_written():
    (code,) = re.findall(r"<!-- tests/test_readme.py runs this -->\n```python\n(.*?)```", README, re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 16
    torch.manual_seed(0)
    names = {}
    exec(code, names)
    model, clients = names["model"], names["clients"]
    accuracy = sum((model(x).argmax(1) == y).float().mean() for x, y in clients) / len(clients)
    assert accuracy > 0.75  # four classes: chance is 0.25
    claims = re.search(r"# (\d+) bytes instead of ([\d,]+)", code).groups()
    packed, dense = (int(text.replace(",", "")) for text in claims)
    local = names["fedbat"].begin(names["method"], model, torch.optim.SGD(model.parameters()), 1)
    assert len(local.finish().to_bytes()) == packed
    assert sum(4 * p.numel() for p in model.parameters()) == dense


PAGES = [
    page for folder in (".", "docs", "examples/*", "experiments", "results/**") for page in ROOT.glob(f"{folder}/*.md")
]


def anchors(page):
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for path, _, anchor in re.findall(r"\]\((?!http)([^)#\s]*)(#([^)\s]+))?\)", page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_readme_leads_to_every_page():
    named = set(re.findall(r"\]\((docs/[^)#]+\.md)", README.split("## More")[1]))
    assert named == {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}


def test_guided_tour_is_five_files_and_names_the_equations_place():
    tour = README.split("## Guided tour")[1].split("Around it")[0]
    files = re.findall(r"\]\((src/[^)]+\.py)\)", tour)
    assert len(files) == 5 and all((ROOT / f).exists() for f in files)
    source = (ROOT / "src/fedbat/binarize.py").read_text()
    assert all(f"Eq. {n}" in source for n in ("6-7", "8-9", "10", "13"))


def test_small_run_page_shows_the_records():
    assert bands.table() in bands.PAGE.read_text()


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.S)


def test_adding_a_method_page_is_true():
    """The page's example works as a method, from a file and a registry line."""
    code, _ = blocks("adding-a-method")
    names = {}
    exec(code, names)
    from fedbat.method import Local
    from fedbat.streams import UniformNoise

    m = torch.tensor([[0.5, -1.5]])
    parts, _ = names["MeanSign"]().encode({"x": m}, Local({"x": m}), {}, UniformNoise(0, "x"))
    assert torch.equal(parts["x"].unpack(), torch.tensor([1.0, -1.0]))


def test_a_part_of_ones_own_goes_all_the_way(monkeypatch):
    """The page's part is trained, sent, read and added; bytes that it cannot have written are refused."""
    monkeypatch.setattr(wire, "KINDS", dict(wire.KINDS))
    names = {}
    exec(blocks("adding-a-method")[1], names)
    method, model, served = names["TopSigns"](), mlp(), mlp()
    server, optimizer = Server(method, served), torch.optim.SGD(model.parameters(), lr=0.1)
    local = begin(method, model, optimizer, 3)
    run(model, optimizer, some_batches(3))
    upload = local.finish()
    server.add(upload.to_bytes(), 1)
    server.step()
    for name, x in model.state_dict().items():
        torch.testing.assert_close(served.state_dict()[name], x, rtol=0, atol=1e-7)
    part = upload.payload.parts["0.weight"]
    assert (part.unpack() != 0).sum() == 20 and part.nbits == 32 + 33 * 20
    record, body = part.record(), part.body()
    spoiled = [body[:4] + body[8:12] + body[4:8] + body[12:], body[:3] + b"\xbf" + body[4:], body[:-1]]
    spoiled += [body[:80] + b"\xff" * 4 + body[84:], body[:-1] + b"\xff"]
    for wrong in spoiled:
        with pytest.raises(WireError):
            names["SparseSigns"].parse(record, part.numel, Reader(memoryview(wrong)))
    del wire.KINDS[224]
    with pytest.raises(WireError, match=r"0.weight: part of kind 224, one of somebody's own .* fedbat.wire.register"):
        server.add(upload.to_bytes(), 1)


def test_the_recipe_of_a_server_optimizer(monkeypatch):
    """Momentum of 0.5: the first round moves by its update, the second by its own and half of the first's."""
    made, each = blocks("own-models")[2].split("\n\n")
    monkeypatch.setattr(torch.optim, "Adam", lambda p, lr: torch.optim.SGD(p, lr=1, momentum=0.5))
    model, vector = mlp(), torch.nn.utils.parameters_to_vector
    names = {"torch": torch, "model": model, "server": (server := Server(FedAvg(), model))}
    exec(made, names)
    before, expected = vector(model.parameters()).detach(), 0.0
    for _ in range(2):
        client = copy.deepcopy(model)
        optimizer = torch.optim.SGD(client.parameters(), lr=0.1)
        with begin(FedAvg(), client, optimizer, 3) as local:
            run(client, optimizer, some_batches(3))
            server.add(local.finish().to_bytes(), 1)
        expected = vector(client.parameters()).detach() - before + 0.5 * expected
        exec(each, names)
        after = vector(model.parameters()).detach()
        torch.testing.assert_close(after - before, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(model[1].running_mean, client[1].running_mean)
        before = after
