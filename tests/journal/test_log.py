"""The journal's keeping: what is bounded, what is lost and counted, and what copies and files have of it."""

from __future__ import annotations

import msgspec

from kvloom.journal.log import MESSAGE_BYTES, Copies, Journal, Outbox, RecordLog
from kvloom.journal.records import Journaled, Lost, Preempted, Record, short
from tests.modelled_units import ManualClock


def event(request: str, reason: str = "gave way to chat") -> Preempted:
    return Preempted(model="m", request=request, reason=reason)


def requests(records: list[Record]) -> list[str]:
    return [record.event.request for record in records if isinstance(record.event, Preempted)]


def test_a_record_has_its_place_and_its_time() -> None:
    clock = ManualClock()
    journal = Journal(clock, epoch=1_000_000.0)
    journal.add("unit-0", event("a"))
    clock.time += 2.5
    journal.add("unit-1", event("b"))
    assert [one.component for one in journal.since(0)] == ["unit-0", "unit-1"]
    first, second = journal.since(0)
    assert (first.number, second.number) == (1, 2)
    assert second.at - first.at == 2.5
    assert first.id.split("-")[0] == second.id.split("-")[0] != "0"


def test_it_keeps_so_many_records_and_no_longer_than_an_hour() -> None:
    clock = ManualClock()
    journal = Journal(clock, most=3)
    for name in "abcd":
        journal.add("unit-0", event(name))
    assert requests(journal.since(0)) == ["b", "c", "d"]
    assert (journal.total, journal.first) == (4, 1)
    clock.time += 3601
    journal.add("unit-0", event("e"))
    assert requests(journal.since(0)) == ["e"]


def test_a_reader_goes_on_behind_what_it_has_and_begins_anew_if_that_is_gone() -> None:
    journal = Journal(ManualClock())
    for name in "abc":
        journal.add("unit-0", event(name))
    second = journal.since(1)[0]
    assert requests(journal.since(journal.after(second.id))) == ["c"]
    assert requests(journal.since(journal.after("7-3"))) == ["a", "b", "c"]
    assert requests(journal.since(journal.after("nonsense"))) == ["a", "b", "c"]
    assert requests(journal.since(journal.after("0-99"))) == ["a", "b", "c"]


def test_a_reader_whose_last_record_is_gone_knows_how_many_it_has_missed() -> None:
    journal, copy = Journal(ManualClock(), most=2), RecordLog()
    for name in "abcde":
        journal.add("unit-0", event(name))
    copy.take(journal.since(0))
    for log in (journal, copy):
        assert log.first - log.after("0-1") == 2
        assert requests(log.since(log.after("0-4"))) == ["e"]


def test_an_outbox_tells_how_old_events_are_and_how_many_were_lost() -> None:
    clock, there = ManualClock(), ManualClock()
    outbox = Outbox(clock, most=2)
    for name in "abc":
        outbox.record(event(name))
    clock.time += 1.5
    noted = outbox.next()
    assert noted is not None
    assert outbox.next() is None
    there.time = 100.0
    journal = Journal(there)
    journal.note("unit-0", noted)
    lost, first, _ = journal.since(0)
    assert isinstance(lost.event, Lost)
    assert lost.event.count == 1
    assert first.at == 98.5


def test_a_message_of_an_outbox_fits_into_a_pipe_with_room() -> None:
    outbox = Outbox(ManualClock())
    for n in range(100):
        outbox.record(event(f"r{n}", short("why " * 1000)))
    told, names = 0, list[str]()
    while (noted := outbox.next()) is not None:
        assert len(msgspec.json.encode(noted)) < MESSAGE_BYTES + 600
        told += 1
        names += [one.event.request for one in noted.events if isinstance(one.event, Preempted)]
    assert names == [f"r{n}" for n in range(100)]
    assert told > 1


def test_copies_have_all_and_a_new_process_has_it_anew() -> None:
    journal = Journal(ManualClock())
    got: dict[str, RecordLog] = {"one": RecordLog(), "two": RecordLog()}

    def tell(name: str, news: Journaled) -> None:
        got[name].take(news.records)

    copies = Copies(journal, tell)
    for n in range(450):
        journal.add("unit-0", event(str(n)))
    copies.update({"one": 1})
    journal.add("unit-0", event("last"))
    copies.update({"one": 1, "two": 1})
    assert got["one"].since(0) == got["two"].since(0) == journal.since(0)
    got["two"] = RecordLog()
    copies.update({"one": 1, "two": 2})
    assert got["two"].since(0) == journal.since(0)
    assert got["one"].total == 451
