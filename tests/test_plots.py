"""What pictures have in common: colours, dashes, ranges; and that a picture is a function of what it shows."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbat.link import Times
from fedbat.methods import METHODS
from fedbat.plots import (
    Curve,
    Line,
    LinkCurve,
    LinkRow,
    Panel,
    digest,
    draw_comparison,
    draw_link,
    draw_panels,
    method_colors,
    run_styles,
    zoom,
)
from fedbat.plots.canvas import log_ticks, new_figure

curves = st.lists(st.lists(st.floats(0, 100), min_size=1, max_size=30), min_size=1, max_size=5)


def test_a_method_keeps_its_colour_in_any_company():
    together = method_colors([*METHODS, "mine"])
    for method in ("fedavg", "fedbat", "ef-signsgd", "zerofl"):
        assert method_colors([method]) == {method: together[method]}
    assert len(set(method_colors(["fedavg", "fedbat", "mine", "yours"]).values())) == 4


def test_colours_tell_methods_and_dashes_their_variants():
    runs = {"fedbat rho=4": "fedbat", "fedavg": "fedavg", "fedbat": "fedbat", "fedbat rho=4 down=4": "fedbat"}
    styles = run_styles(runs)
    assert styles.keys() == runs.keys() and len(set(styles.values())) == len(runs)
    assert {label for label, style in styles.items() if not style.dash} == {"fedavg", "fedbat"}  # the plainest
    assert len({styles[label].color for label, method in runs.items() if method == "fedbat"}) == 1


def test_no_two_runs_look_alike_however_many_there_are():
    runs = {f"{method} rho={rho}": method for method in map(str, range(20)) for rho in range(8)}
    styles = run_styles(runs)
    assert styles.keys() == runs.keys() and len(set(styles.values())) == len(runs)
    same = [style.dash for style in styles.values() if style.color == styles["0 rho=0"].color]
    lines = ["".join("# "[place % 2] * length for place, length in enumerate(dash)) or "#" for dash in same]
    for one, other in combinations(lines, 2):  # not even one a piece of the other
        assert one * len(other) not in 2 * other * len(one)


@given(curves)
def test_a_range_holds_a_curve_after_a_fifth_and_the_second_half_of_most_rounds_of_every_curve(found):
    low, high = zoom(found)
    assert low <= max(curve[len(curve) // 5] for curve in found)
    for curve in found:
        half = curve[len(curve) // 2 :]
        assert max(half) <= high and 2 * sum(value >= low for value in half) >= len(half)


@given(st.floats(1e-3, 1e9), st.floats(1.05, 1e6))
@settings(max_examples=40, deadline=None)
def test_a_logarithmic_axis_has_a_few_ticks_however_narrow_it_is(low, ratio):
    _, [[axes]] = new_figure(4, 4, 1, 1)
    axes.set(xscale="log", xlim=(low, ratio * low))
    log_ticks(axes.xaxis)
    assert 3 <= sum(low <= tick <= ratio * low for tick in axes.xaxis.get_majorticklocs()) <= 10


def test_a_curve_on_a_link_reaches_an_accuracy_after_the_seconds_until_then():
    curve = LinkCurve("fedbat", [0.2, 0.6, 0.5, 0.9], [Times(0, 1, 1, 1)] * 4)
    assert curve.first_from(60) == (6, pytest.approx(60)) and curve.first_from(61) == (12, pytest.approx(90))
    assert curve.first_from(95) == curve.points()[-1]


def test_the_same_runs_give_the_same_pictures(tmp_path):
    accuracy = [0.2, 0.6, 0.5, 0.9]
    for name in ("a", "b"):
        runs = {label: Curve(label, accuracy, [10] * 4, [100] * 4) for label in ("fedavg", "fedbat")}
        draw_comparison(runs, "title", tmp_path / f"{name}-runs.png")
        row = LinkRow("row", 0.5, {"fedbat": LinkCurve("fedbat", accuracy, [Times(0.1, 1, 2, 1, 0.1)] * 4)})
        draw_link([row], "title", tmp_path / f"{name}-link.png")
    for picture in ("runs", "link"):
        assert (tmp_path / f"a-{picture}.png").read_bytes() == (tmp_path / f"b-{picture}.png").read_bytes()


def test_a_hash_tells_pictures_apart_by_what_can_be_seen():
    def panel(value, method="fedbat"):
        return [Panel("title", {method: Line([1, 2], [50.0, value])})]

    assert digest(panel(60.0)) == digest(panel(60.0 + 1e-9))
    assert len({digest(panel(60.0)), digest(panel(60.1)), digest(panel(60.0, "fedavg")), digest([])}) == 4


def drawn(monkeypatch, tmp_path, panels, **how):
    """The axes of panels."""
    kept = []
    monkeypatch.setattr("fedbat.plots.panels.save", lambda figure, *_: kept.append(figure))
    draw_panels(panels, "", [tmp_path / "x.svg"], **how)
    return kept[0].axes


def test_a_method_far_below_does_not_rule_what_is_in_sight(monkeypatch, tmp_path):
    curves = {name: Line(range(20), [end] * 20) for name, end in (("a", 85.0), ("b", 84.0), ("far", 60.0))}
    (axes,) = drawn(monkeypatch, tmp_path, [Panel("", curves)])
    low, high = axes.get_ylim()
    assert 60 < low < 84 and 85 < high < 90


def test_errors_of_one_picture_have_one_range_and_gigabytes_their_name(monkeypatch, tmp_path):
    panels = [Panel("", {"fedbat": Line([1e8, 1e10], [low, 2 * low])}) for low in (0.1, 10.0)]
    first, second = drawn(monkeypatch, tmp_path, panels, log=True, by_bytes=True)
    low, high = first.get_ylim()
    assert first.get_ylim() == second.get_ylim() and low <= 0.1 and high >= 20
    ticks = [first.xaxis.get_major_formatter()(value, 0) for value in (1e8, 1e9, 1e10)]
    assert ticks == ["100 MB", "1 GB", "10 GB"]


def test_many_runs_with_long_names_on_a_link_are_readable(tmp_path, monkeypatch):
    """Nothing is cut off, and no two texts of an axis or the title lie over each other."""
    drawn = []
    monkeypatch.setattr("fedbat.plots.links.save", lambda figure, paths: drawn.append(figure))
    curves = {
        f"zerofl train_sparsity=0 weights=batches average=0.9 rho={n}": LinkCurve(
            "zerofl", [0.2, 0.6, 0.7, 0.9], [Times(0, 1, 2, seconds) for seconds in (2, 200, 2e4, 1.2e6)], " (3 seeds)"
        )
        for n in range(20)
    }
    draw_link([LinkRow("cifar100, labels-balanced labels=10, 100 clients; " * 2, 0.5, curves)] * 2, "x", tmp_path / "x")
    (figure,) = drawn
    figure.canvas.draw()
    for axes in figure.axes:
        ticks = [[text.get_window_extent() for text in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis)]
        for boxes in ticks:
            assert len(boxes) > 1 and not any(a.overlaps(b) for a, b in pairwise(boxes))
    whole, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert whole.x0 >= 0 and whole.y0 >= 0 and whole.x1 <= width and whole.y1 <= height
