"""Charts in a notebook cell: valid SVG without references, with the figures of the object."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.analysis.timeline import KINDS
from lowtide.limits import format_bytes
from once import on_one_recorder
from test_see import wide

pytestmark = on_one_recorder


def drawn(shown: Any) -> ElementTree.Element:
    """The chart of a result in a notebook."""
    found = re.search(r"<svg.*?</svg>", shown._repr_html_(), re.DOTALL)
    assert found is not None
    assert not re.search("script|href|url", found[0])
    return ElementTree.fromstring(found[0])


def outline(path: ElementTree.Element) -> list[tuple[float, float]]:
    numbers = [float(n) for n in re.findall(r"[0-9.]+", path.attrib["d"])]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def height_of(chart: ElementTree.Element) -> Callable[[float], float]:
    """From a height on the chart to the share of its highest line across."""
    across = [outline(p)[0][1] for p in chart.iter("path") if p.get("stroke-opacity")]
    return lambda y: (across[0] - y) / (across[0] - across[-1])


def test_a_notebook_draws_the_curve() -> None:
    model = wide(4)
    curve = lowtide.curve(lambda x: model(x).square().mean(), torch.randn(256, 32))
    chart = drawn(curve)
    share = height_of(chart)
    dots = list(chart.iter("circle"))
    assert len(dots) == len(curve) > 3
    slowest = max(0.05, *(plan.overhead for plan in curve))
    for dot, plan in zip(dots, curve, strict=True):
        assert share(float(dot.attrib["cy"])) == pytest.approx(plan.overhead / slowest, abs=0.01)
        assert dot[0].text == f"{format_bytes(plan.peak)}, {plan.overhead:.1%} more time"
    dashed = next(p for p in chart.iter("path") if p.get("stroke-dasharray"))
    for (_, y), plan in zip(outline(dashed), curve, strict=True):
        assert share(y) == pytest.approx((plan.lower_bound or 0.0) / slowest, abs=0.01)


@pytest.mark.parametrize("layers", [2, 60])
def test_a_notebook_draws_the_step_with_its_peak(layers: int) -> None:
    model = wide(layers)

    def step(x: Tensor) -> Tensor:
        return model(x).square().mean()

    told = lowtide.explain(step, torch.randn(256, 32), limit=0.75)
    assert told.planned is not None
    assert told.plan is not None
    for shown, line in ((told, told.planned), (told.plain, told.plain)):
        chart = drawn(shown)
        share = height_of(chart)
        most = max(told.plain.peak, line.peak)
        layers_drawn = [p for p in chart.iter("path") if p.get("fill", "none") != "none"]
        assert len(layers_drawn) == len(KINDS)
        assert all(len(outline(p)) <= 4 * 320 for p in layers_drawn)
        top = min(y for path in layers_drawn for _, y in outline(path))
        assert share(top) == pytest.approx(line.peak / most, abs=0.01)
        dashed = [p for p in chart.iter("path") if p.get("stroke-dasharray")]
        assert len(dashed) == (shown is told)
        for path in dashed:
            top = min(y for _, y in outline(path))
            assert share(top) == pytest.approx(told.plain.peak / most, abs=0.01)
        limits = [p for p in chart.iter("path") if p.get("stroke-width") == "2"]
        assert len(limits) == (shown is told)
        for path in limits:
            y = outline(path)[0][1]
            assert share(y) == pytest.approx((told.plan.limit or 0) / most, abs=0.01)
        words = [t.text for t in chart.iter("text")]
        assert {"forward", "backward"} <= set(words)
        assert words.index("forward") < words.index("backward")
