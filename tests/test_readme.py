"""What README and docs say is run and checked."""

import re
from pathlib import Path

import pytest
import torch

from tests import bands

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


def test_adding_a_method_page_is_true():
    """The page's example works as a method, from a file and a registry line."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adding-a-method.md").read_text(), re.S)
    names = {}
    exec(code, names)
    from fedbat.method import Local
    from fedbat.streams import UniformNoise

    m = torch.tensor([[0.5, -1.5]])
    parts, _ = names["MeanSign"]().encode({"x": m}, Local({"x": m}), {}, UniformNoise(0, "x"))
    assert torch.equal(parts["x"].unpack(), torch.tensor([1.0, -1.0]))
