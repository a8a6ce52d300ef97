"""The page in a real browser: no error, no request, the figures of the JSON, keys, dark, phone."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import browser
from lowtide.analysis.study import study
from lowtide.explain import explain_study
from lowtide.export.document import Trial, document
from lowtide.limits import format_bytes
from lowtide.page import page
from once import on_one_recorder

pytestmark = on_one_recorder

WIDE, PHONE, SMALL = 1200, 390, 360
KEPT = 3  # in a moment, the place of the bytes that are kept, followed by those of other kinds

# How many labels of the timeline overlap another.
OVERLAPS = (
    "(() => { const t = [...document.querySelectorAll('#time-chart text')].map(e =>"
    " e.getBoundingClientRect()); let n = 0; t.forEach((a, i) => t.slice(i + 1).forEach(b => {"
    " if (a.left < b.right && b.left < a.right && a.top < b.bottom - 3 && b.top < a.bottom - 3)"
    " n++; })); return n; })()"
)


def made(name: str = "a step", limit: float | None = 0.5) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]
    )
    subject = study(lambda x: model(x).square().mean(), (torch.randn(512, 64),), name=name)
    told = explain_study(subject, limit)
    trials = (
        Trial("plain", told.plain.peak, told.plain.peak + 5, 0.25),
        Trial("planned", 123_456_789, 123_466_000, 1.234),
    )
    data = document(told, curve=subject.curve, trials=trials if limit else ())
    return dict(json.loads(json.dumps(data)))


@functools.cache
def shown() -> dict[str, Any]:
    """The document of most tests here, none of which changes it."""
    return made()


# ---------------------------------------------------------------------------- without a browser


def test_it_is_one_file_that_asks_for_nothing() -> None:
    text = page(shown())
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", text)
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|WebSocket", text)
    assert "default-src 'none'" in text
    assert len(text) < 300_000


def test_names_cannot_break_out_of_their_place() -> None:
    name = "</script><script>alert(1)</script><!-- %JS% &"
    text = page({**shown(), "name": name})
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert inside is not None
    assert json.loads(inside[1])["name"] == name
    assert "alert(1)</script><!--" not in text


# ---------------------------------------------------------------------------- with one


@pytest.fixture(scope="module")
def tab() -> Iterator[browser.Tab]:
    if browser.find() is None:
        pytest.skip("no Chromium or Chrome on the path, and LOWTIDE_BROWSER names none")
    with browser.tab() as found:
        yield found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "report.html"
    place.write_text(page(shown()), encoding="utf-8")
    return place


def looked_up(data: Any, name: str) -> Any:
    for part in name.split("."):
        data = data[int(part)] if isinstance(data, list) else data[part]
    return data


def test_it_draws_itself_without_a_word_or_a_request(tab: browser.Tab, path: Path) -> None:
    tab.said.clear()
    tab.asked.clear()
    tab.open(path)
    assert tab.said == []
    assert set(tab.asked) == {path.resolve().as_uri()}
    assert tab.value("document.querySelectorAll('#time-chart path[data-kind]').length") == 4
    assert tab.value("document.querySelectorAll('section:not([hidden]) h2').length") == 9


def test_every_figure_is_that_of_the_json(tab: browser.Tab, path: Path) -> None:
    tab.open(path)
    for which in ("Plain", "Planned"):
        tab.value(
            "[...document.querySelectorAll('#which-peak button')]"
            f".find(b => b.textContent === '{which}').click()"
        )
        found = tab.value(
            "[...document.querySelectorAll('[data-figure]')]"
            ".map(e => [e.dataset.figure, e.dataset.value, e.textContent])"
        )
        names = {name for name, _, _ in found}
        assert names >= {"plain.peak", "plan.peak", "plan.limit", "curve.3.peak", "standing"}
        assert f"{which.lower()}.holders.0.nbytes" in names
        for name, value, text in found:
            if name == "standing":
                expected = sum(shown()["standing"].values())
            else:
                expected = looked_up(shown(), name)
            assert float(value) == expected, name
            if isinstance(expected, int):
                assert text == format_bytes(expected), name
            else:
                assert text.startswith(f"{100 * expected:.1f} %"), name
    strip = tab.value(
        "[...document.querySelectorAll('.strip-row')].map(r => [+r.dataset.kept, "
        "+r.dataset.recomputed])"
    )
    modules = [
        [m["kept_bytes"], m["recomputed_bytes"]]
        for m in shown()["plan"]["modules"]
        if m["kept_bytes"] + m["recomputed_bytes"]
    ]
    assert strip == modules


def together(tab: browser.Tab) -> int:
    return int(tab.value("document.querySelector('#readout tr.total td.n').dataset.value"))


def test_the_timeline_is_walked_with_the_keyboard(tab: browser.Tab, path: Path) -> None:
    tab.open(path)
    tab.value("document.getElementById('time-chart').focus()")
    moments = shown()["planned"]["moments"]
    assert together(tab) == shown()["planned"]["peak"]  # the page opens at the peak
    tab.key("Home")
    assert together(tab) == sum(moments[0][3:])
    tab.key("ArrowRight")
    assert together(tab) == sum(moments[1][3:])
    operator, module, line = shown()["sites"][moments[1][2]]
    said = tab.value("document.getElementById('readout').textContent")
    assert all(part in said for part in (operator, module, line))
    tab.key("End")
    assert together(tab) == sum(moments[-1][3:])
    tab.key("p")
    assert together(tab) == shown()["planned"]["peak"]


def test_it_is_pointed_at(tab: browser.Tab, path: Path) -> None:
    tab.open(path)
    tab.value("document.getElementById('time-chart').scrollIntoView()")
    box = tab.value(
        "(() => { const b = document.getElementById('time-chart').getBoundingClientRect();"
        " return [b.left, b.top, b.width, b.height]; })()"
    )
    tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + 68, y=box[1] + 60)
    assert "operation 0 of the forward" in tab.value(
        "document.getElementById('readout').textContent"
    )


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [WIDE, PHONE, SMALL])
def test_it_is_readable_everywhere(tab: browser.Tab, path: Path, width: int, dark: bool) -> None:
    tab.open(path, width=width, dark=dark)
    assert tab.value("document.documentElement.scrollWidth") <= width
    colours = tab.value(
        "(() => { const s = getComputedStyle(document.body);"
        " return [s.color, s.backgroundColor]; })()"
    )
    ink, paper = (luminance(colour) for colour in colours)
    assert (ink > paper) is dark
    assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 7
    assert tab.value(OVERLAPS) == 0
    tab.value("document.getElementById('base').click()")
    assert tab.value(OVERLAPS) == 0
    cut_off = tab.value(
        "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
        ".map(e => e.ariaLabel)"
    )
    assert cut_off == []
    # No text next to a bar overflows its card.
    beside = tab.value(
        "[...document.querySelectorAll('.strip-row')].filter(r => r.querySelector('.say')"
        ".getBoundingClientRect().right > r.getBoundingClientRect().right + 1).length"
    )
    assert beside == 0
    small = tab.value(
        "[...document.querySelectorAll('button')].filter(b => !b.hidden && b.offsetParent &&"
        " b.getBoundingClientRect().height < 32).length"
    )
    assert small == 0


def test_the_labels_of_an_early_peak_and_its_limit_are_apart(
    tab: browser.Tab, tmp_path: Path
) -> None:
    """The limit is just above a peak in the first operation."""
    moments = [list(moment) for moment in shown()["planned"]["moments"]]
    peak = shown()["planned"]["peak"]
    moments[0][KEPT] += peak - sum(moments[0][KEPT:])
    planned = {**shown()["planned"], "moments": moments, "at": 0}
    plan = {**shown()["plan"], "limit": peak + peak // 50}
    path = tmp_path / "early.html"
    path.write_text(page({**shown(), "planned": planned, "plan": plan}), encoding="utf-8")
    for width in (PHONE, 900, WIDE):
        tab.open(path, width=width)
        for _ in range(2):
            assert tab.value(OVERLAPS) == 0, width
            tab.value("document.getElementById('base').click()")


def test_letters_that_share_a_place_at_the_edge_stay_in_the_chart(
    tab: browser.Tab, tmp_path: Path
) -> None:
    peak = shown()["plain"]["peak"]
    plan = {**shown()["plan"], "limit": peak - 1}
    options = [{**option, "peak": peak, "overhead": 0.1} for option in shown()["options"]]
    assert len(options) > 4
    path = tmp_path / "edge.html"
    path.write_text(page({**shown(), "plan": plan, "options": options}), encoding="utf-8")
    tab.open(path, width=PHONE)
    outside = tab.value(
        "(() => { const b = document.querySelector('#curve-chart').getBoundingClientRect();"
        " return [...document.querySelectorAll('#curve-chart :is(text, circle)')].filter(e =>"
        " e.getBoundingClientRect().right > b.right).map(e => e.textContent); })()"
    )
    assert outside == []
    places = tab.value(
        "[...document.querySelectorAll('#curve-chart g.point circle')].map(e => +e.attributes.cx"
        ".value).sort((a, b) => a - b)"
    )
    assert len(places) == len(options)
    assert all(right - left >= 17 for left, right in itertools.pairwise(places))


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_page_without_a_plan_draws_itself_too(tab: browser.Tab, tmp_path: Path) -> None:
    path = tmp_path / "plain.html"
    path.write_text(page(made(limit=None)), encoding="utf-8")
    tab.said.clear()
    tab.open(path)
    assert tab.said == []
    assert tab.value("document.getElementById('no-trials').hidden") is False
    assert tab.value("document.getElementById('modules-section').hidden") is True


def test_a_plan_that_did_not_hold_is_said_at_the_top(tab: browser.Tab, tmp_path: Path) -> None:
    path = tmp_path / "refused.html"
    path.write_text(page({**shown(), "trial_refused": "it needs more"}), encoding="utf-8")
    tab.open(path)
    assert "the plan did not hold" in tab.value("document.querySelector('h1').textContent")
    assert "it needs more" in tab.value("document.getElementById('trial-refused').textContent")


def test_large_sizes_and_small_errors_are_written_as_in_the_text(
    tab: browser.Tab, tmp_path: Path
) -> None:
    path = tmp_path / "large.html"
    trial = {"label": "plain", "predicted": 1101863431, "measured": 1101863432, "seconds": 1.0}
    path.write_text(page({**shown(), "trials": [trial]}), encoding="utf-8")
    tab.open(path)
    text = tab.value("document.getElementById('trials').textContent")
    assert format_bytes(1101863432) in text
    assert "0.0 %" in text
    assert "-" not in text


def test_a_picture_of_it_can_be_taken(tab: browser.Tab, path: Path, tmp_path: Path) -> None:
    tab.open(path)
    picture = tmp_path / "page.png"
    tab.screenshot(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
