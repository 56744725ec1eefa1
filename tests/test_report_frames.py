"""The page of `fedbat report` shows long curves smoothed and near the best at first, and everything when asked."""

import json
import shutil
from statistics import fmean

import pytest

from fedbat.engine.sequential import SequentialEngine
from fedbat.experiment import Experiment, prepare
from fedbat.report import find_runs, render
from fedbat.report.frames import accuracy_frame, loss_frame
from fedbat.run import run_recorded
from tests.test_report import SMALL, Reader, browse, needs_browser

ROUNDS = 60
LEVELS = {"fedavg": 0.88, "ef-signsgd": 0.87, "noisy-signsgd": 0.86, "signsgd": 0.2}

PROBE = """<script>
const done = new MutationObserver(async () => {
  done.disconnect();
  const chart = document.querySelector('.chart[data-y="accuracy"][data-x="round"]');
  const bytes = document.querySelector('.chart[data-y="accuracy"][data-x="uplink"]');
  const smooth = document.querySelector(".smooth"), buttons = [...document.querySelectorAll(".curves button")];
  const line = () => chart.data.find((trace) => trace.name === "fedavg" && trace.customdata);
  const pressed = () => smooth.getAttribute("aria-pressed"), range = () => [...chart.layout.yaxis.range];
  const read = () => ({ y: [...line().y], range: range(), pressed: pressed() });
  const found = { smoothed: read(), told: line().customdata[30], start: bytes.layout.xaxis.range[0] };
  found.hint = document.querySelector("section .hint").textContent;
  const doubleClick = async () => {
    const area = chart.querySelector(".nsewdrag"), { left, top } = area.getBoundingClientRect();
    for (const type of ["mousedown", "mouseup", "mousedown", "mouseup"]) {
      const place = { clientX: left + 50, clientY: top + 50, bubbles: true, view: window };
      const hit = (type === "mouseup" && document.querySelector(".dragcover")) || area;
      hit.dispatchEvent(new MouseEvent(type, place));
    }
    await new Promise((drawn) => setTimeout(drawn, 500));
    return range();
  };
  found.everything = await doubleClick();
  found.again = await doubleClick();
  smooth.click();
  found.raw = read();
  buttons.find((button) => button.textContent === "signsgd").dispatchEvent(new Event("dblclick"));
  await new Promise((drawn) => setTimeout(drawn, 100));
  found.low = range();
  document.documentElement.dataset.found = JSON.stringify(found);
});
done.observe(document.documentElement, { attributeFilter: ["data-state"] });
</script></body>"""


def curve(level, rounds=ROUNDS):
    """From a guess to a level, and on with some noise."""
    return [min(level, 10 + 5 * n) + (n % 3) / 2 for n in range(rounds)]


def test_a_frame_shows_the_curves_near_the_best_and_names_the_others():
    frame = accuracy_frame([curve(88), curve(87), curve(20), curve(86), [10.0, 11.0]])
    assert frame.below == [2] and 80 < frame.low < 86 and 88.5 + 0.5 < frame.high + 0.5 < 92
    halves = [value for level in (88, 87, 86) for value in curve(level)[ROUNDS // 2 :]]
    assert frame.low < min(halves) and max(halves) < frame.high


def test_a_frame_of_losses_is_that_of_accuracies_turned_over():
    losses = [[10 ** (-value / 50) for value in curve(level)] for level in (88, 87, 20, 86)]
    frame = loss_frame(losses)
    assert frame.below == [2] and frame.low < min(map(min, losses)) < frame.high < losses[2][-1]


@pytest.mark.parametrize("curves", [[], [curve(88, 19), curve(20, 19)], [[None] * 50]])
def test_short_curves_and_those_that_diverged_have_no_frame(curves):
    assert accuracy_frame(curves) is loss_frame(curves) is None


def test_curves_that_are_alike_have_a_frame_of_some_height():
    frame = accuracy_frame([[80.0] * 50, [80.0] * 50])
    assert frame.high - frame.low >= 2 and frame.low < 80 < frame.high and not frame.below


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Long runs that end at these levels; every figure but accuracy and rounds is that of a short one."""
    root = tmp_path_factory.mktemp("frames")
    federation = prepare(Experiment(method="fedavg", **(SMALL | {"rounds": 1})))
    run_recorded(federation, SequentialEngine(federation), root / "short")
    summary = json.loads((root / "short" / "summary.json").read_text())
    line = json.loads((root / "short" / "rounds.jsonl").read_text())
    for method, level in LEVELS.items():
        config = summary["config"] | {"method": method, "rounds": ROUNDS}
        (root / method).mkdir()
        changes = {"config": config, "method_settings": {}, "rounds_done": ROUNDS}
        (root / method / "summary.json").write_text(json.dumps(summary | changes))
        lines = [line | {"round": n, "accuracy": value / 100} for n, value in enumerate(curve(100 * level), start=1)]
        (root / method / "rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    shutil.rmtree(root / "short")
    return root


@needs_browser
@pytest.mark.slow
def test_long_runs_are_smoothed_and_framed_until_one_asks_for_more(folder, tmp_path):
    page = render(find_runs([folder])[0], "x")
    _, root = Reader(browse(page.replace("</body>", PROBE), tmp_path, "--dump-dom")).tags[0]
    found, accuracy = json.loads(root["data-found"]), curve(88)
    assert (found["smoothed"]["pressed"], found["raw"]["pressed"]) == ("true", "false")
    assert found["raw"]["y"] == pytest.approx(accuracy, rel=1e-5)
    means = [fmean(accuracy[max(0, n - 4) : n + 1]) for n in range(ROUNDS)]
    assert found["smoothed"]["y"] == pytest.approx(means, rel=1e-5)
    assert f"accuracy {accuracy[30]:.2f} %" in found["told"] and f"drawn: {means[30]:.2f} %" in found["told"]
    assert found["smoothed"]["range"] == found["raw"]["range"] and found["raw"]["range"][0] > 75
    assert found["everything"][0] < 15 and found["again"] == found["raw"]["range"]
    assert "signsgd" in found["hint"] and "fedavg" not in found["hint"]
    uplink = json.loads((folder / "fedavg" / "rounds.jsonl").read_text().splitlines()[0])["uplink_bytes"]
    assert 10 ** found["start"] > 8 * uplink  # what is left of the frame is not shown
    low, high = found["low"]
    assert low < 15 and high < 30  # alone, the curve beyond the frame is seen
