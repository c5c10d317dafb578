"""Each type of record on the page: in its lane and in the list, with all that it has to say."""

from __future__ import annotations

import re
from typing import Any, get_args, get_type_hints

import msgspec
from playwright.sync_api import Browser, Page, Route, expect

from kvloom.journal.records import Event, Record
from kvloom.journal.samples import Sample, UnitSample
from tests.page.browser import shown
from tests.page.conftest import KEY, Served

BEGAN = 1_000_000.0
APART = 10.0  # seconds between two events; all are in the span that is drawn
VALUES: dict[Any, tuple[Any, list[str]]] = {
    int: (4321, ["4321"]),
    float: (2.5, ["2.5 s"]),
    float | None: (2.5, ["2.5 s"]),
    tuple[str, ...]: (("model-a", "model-b"), ["model-a", "model-b"]),
}
"""By a field's type, what it is in the test, and how the page says it."""


def example(kind: Any) -> tuple[Event, list[str]]:
    """An event of this type with something in each field, and how the page says these."""
    fields, words = {}, list[str]()
    for name, of in get_type_hints(kind).items():
        fields[name], said = (f"some-{name}", [f"some-{name}"]) if of is str else VALUES[of]
        words += said
    return kind(**fields), words


EXAMPLES = {f"lane-{number}": example(kind) for number, kind in enumerate(get_args(Event), 1)}


def tell(page: Page, records: list[Record], moments: list[float]) -> None:
    """Lets the page know of these events, and of a sample at each of these times: of all that the list has
    when the page asks. The page asks again and again, for each answer ends."""
    unit = UnitSample(unit="unit-0", state="up", node="", blocks=0, free=0, lent=0, block_bytes=0, models=())

    def answer(route: Route) -> None:
        name, told = "", list[Any](records)
        if route.request.url.endswith("/live"):
            name, told = "event: sample\n", [Sample(at=at, units=(unit,), models=()) for at in moments]
        body = "".join(f"{name}data: {msgspec.json.encode(one).decode()}\n\n" for one in told)
        route.fulfill(content_type="text/event-stream", body=body)

    page.route(re.compile("/admin/(live|events)$"), answer)


def of_each_type(page: Page) -> None:
    """Lets the page know of one event of each type."""
    records = [
        Record(journal=1, number=number, at=BEGAN + APART * number, component=component, event=event)
        for number, (component, (event, _)) in enumerate(EXAMPLES.items(), 1)
    ]
    tell(page, records, [BEGAN, records[-1].at + APART])


def test_each_type_of_record_is_told_with_all_that_it_says(browser: Browser, served: Served) -> None:
    with shown(browser, served.url, key=KEY, before=of_each_type) as (page, _):
        expect(page.locator("#log li")).to_have_count(len(EXAMPLES))
        for component, (event, words) in EXAMPLES.items():
            kind = str(event.__struct_config__.tag)
            logged = page.locator(f"#log li[data-component={component}]")
            expect(logged).to_have_attribute("data-type", kind)
            mark = page.locator(f".lane[data-component={component}] button.mark")
            expect(mark).to_have_attribute("data-types", kind)
            expect(mark).to_be_visible()  # hidden until the page knows the models, and then not to be focused
            mark.focus()
            for told in (logged, page.get_by_role("tooltip")):
                for word in (kind.replace("_", " "), *words):  # the tooltip comes a moment after the focus
                    expect(told).to_contain_text(word, use_inner_text=True)


def test_a_mark_keeps_the_focus_when_an_older_one_leaves(browser: Browser, served: Served) -> None:
    event, _ = EXAMPLES["lane-1"]
    records = [
        Record(journal=1, number=number, at=BEGAN + at, component="lane-1", event=event)
        for number, at in enumerate((0, 100, 200), 1)
    ]
    moments = [BEGAN, BEGAN + 290]
    with shown(browser, served.url, key=KEY, before=lambda page: tell(page, records, moments)) as (page, _):
        marks = page.locator(".lane[data-component=lane-1] button.mark")
        expect(marks).to_have_count(3)
        expect(marks.last).to_be_visible()
        marks.last.focus()
        moments.append(BEGAN + 320)  # of the five minutes shown, the first event is out
        expect(marks).to_have_count(2)
        expect(marks.last).to_be_focused()
        expect(page.get_by_role("tooltip")).to_be_visible()
