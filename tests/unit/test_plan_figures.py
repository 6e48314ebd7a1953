"""Panels as they are drawn: what is read stands free of what is shown."""

from __future__ import annotations

import pytest
from matplotlib.transforms import Bbox

from stoker_sim._experiments import Panel, Series, _create_figure, _touches

NAMES = [f"a setting with quite a long name, {number}" for number in range(6)]


def panel(series: list[Series], *, x_log: bool = False) -> Panel:
    return Panel("t", "x\nin two lines", "y", series, x_log=x_log)


def everywhere() -> list[Series]:
    """Return lines that leave no room between them."""
    return [Series(name, [0, 1, 2, 3], [number, 5 - number, number, 5 - number]) for number, name in enumerate(NAMES)]


def below() -> list[Series]:
    return [Series(name, [0, 3], [0, number / 100 + 0.01]) for number, name in enumerate(NAMES)]


@pytest.mark.parametrize("others", [0, 3])
def test_a_legend_lies_on_no_line(others: int) -> None:
    figure = _create_figure([panel(everywhere()), *[panel(below())] * others], "title")
    figure.draw_without_rendering()
    for axes in figure.axes:
        box = axes.get_legend().get_window_extent()
        assert not any(_touches(line, box) for line in axes.lines)
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width
        assert 0 <= box.y0 < box.y1 <= figure.bbox.height


def test_a_legend_stays_in_a_corner_that_is_free_and_goes_below_the_axes_if_none_is() -> None:
    free = [Series("a", [0, 1, 2, 3], [0, 0, 0, 1]), Series("b", [0, 3], [0, 0.1])]
    for series, is_inside in ((free, True), (everywhere(), False)):
        figure = _create_figure([panel(series)], "title")
        figure.draw_without_rendering()
        (axes,) = figure.axes
        legend, frame = axes.get_legend().get_window_extent(), axes.get_window_extent()
        assert bool(legend.y0 > frame.y0) is is_inside
        assert bool(legend.y1 <= axes.xaxis.label.get_window_extent().y0) is not is_inside


def test_points_are_no_line_between_them() -> None:
    apart = [Series("a", [0, 3], [1, 1], kind="points"), Series("b", [0, 3], [0, 0])]
    figure = _create_figure([panel(apart)], "title")
    (axes,) = figure.axes
    middle = axes.transData.transform([(1.4, 0.9), (1.6, 1.1)])
    box = Bbox(middle)
    points, line = axes.lines
    assert not _touches(points, box)
    line.set_ydata([1, 1])
    assert _touches(line, box)


@pytest.mark.parametrize(("x", "named"), [((10, 30, 4000), ["10", "30", "4,000"]), (range(1, 40), None)])
def test_a_logarithmic_axis_names_few_values_and_powers_of_ten_else(
    x: tuple[int, ...], named: list[str] | None
) -> None:
    figure = _create_figure([panel([Series("a", list(x), list(x))], x_log=True)], "title")
    figure.draw_without_rendering()
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == named if named is not None else any("10^" in label for label in labels)
