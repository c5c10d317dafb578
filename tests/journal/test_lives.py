"""The lives of requests: bounded, and with the journal's records in their places."""

from __future__ import annotations

from kvloom.journal.lives import MOST_STEPS, Lives, Tokens
from kvloom.journal.records import Event, Moved, Preempted, Ready, Record

A, B = "chatcmpl-a", "chatcmpl-b"


def record(at: float, component: str, event: Event) -> Record:
    return Record(journal=1, number=1, at=at, component=component, event=event)


def test_a_life_goes_from_queued_over_decode_to_its_end() -> None:
    lives = Lives()
    story = lives.begin("mine")
    story.api_id = A
    lives.ask(story, [A])
    states = [story.life().state]
    lives.tell(A, "queued", "unit-0")
    lives.tell(A, "admitted", "unit-0")
    states.append(story.life().state)
    lives.tell(A, "first_token", "unit-0")
    states.append(story.life().state)
    lives.tell(A, "admitted", "unit-1")  # of a part that came later
    states.append(story.life().state)
    story.tokens_by(lambda: Tokens(7, 5, 2))
    assert (story.life().prompt_tokens, story.life().output_tokens, story.life().cached_tokens) == (7, 5, 2)
    story.end(200)
    life = story.life()
    assert [*states, life.state] == ["queued", "prefill", "decode", "decode", "ended"]
    assert [step.what for step in life.steps][:3] == ["came", "queued", "admitted"]
    assert life.steps[-1].what == "ended"
    assert life.output_tokens == 5
    assert lives.find("mine") is lives.find(A) is lives.find(f"{A}~2") is story
    assert lives.find("chatcmpl-") is None


def test_an_end_that_is_none_has_its_reason() -> None:
    for status, state in ((499, "cancelled"), (503, "failed"), (200, "ended")):
        story = Lives().begin("x")
        story.end(status, "unavailable" if state == "failed" else "")
        assert (story.life().state, story.life().steps[-1].what) == (state, state)
    assert story.life().steps[-1].reason == ""


def test_records_of_the_request_and_of_its_later_attempts_stand_between_its_steps() -> None:
    lives = Lives()
    story = lives.begin("mine")
    lives.ask(story, [A])
    began = story.life().began
    moved = Moved(request=A, model="m", source="unit-0", destination="unit-1", reason="freeness 1 against 9")
    lost = Preempted(model="m", request=f"{A}~2", reason="gave way to code")
    other = Preempted(model="m", request=f"{A}b", reason="of another request")
    records = [
        record(began + 2, "gateway/1", moved),
        record(began + 1, "unit-0", lost),
        record(began + 3, "unit-0", other),
        record(began + 4, "unit-0", Ready(reason="of no request", seconds=1.0)),
    ]
    told = [(step.what, step.unit, step.reason) for step in story.life(records).steps]
    assert told == [
        ("came", "", ""),
        ("preempted", "unit-0", "gave way to code"),
        ("moved", "unit-1", "freeness 1 against 9"),
    ]


def test_a_request_that_was_preempted_before_its_first_token_waits_until_it_is_admitted_again() -> None:
    lives = Lives()
    story = lives.begin("mine")
    lives.ask(story, [A])
    lives.tell(A, "admitted", "unit-0")
    lost = record(story.life().steps[-1].at, "unit-0", Preempted(model="m", request=A, reason="gave way"))
    states = [story.life([lost]).state]
    lives.tell(A, "admitted", "unit-0")
    states.append(story.life([lost]).state)
    lives.tell(A, "first_token", "unit-0")
    again = record(story.life().steps[-1].at, "unit-0", Preempted(model="m", request=A, reason="gave way"))
    assert [*states, story.life([lost, again]).state] == ["queued", "prefill", "decode"]


def test_lives_are_bounded_and_the_newest_of_an_id_is_found() -> None:
    lives = Lives(most=3)
    first = lives.begin("same")
    lives.ask(first, [A])
    stories = [lives.begin("same"), lives.begin("b"), lives.begin("c")]
    lives.ask(stories[0], [B])
    assert [line.id for line in lives.last()] == ["c", "b", "same"]
    assert lives.find("same") is stories[0]
    lives.tell(A, "queued", "unit-0")  # nobody keeps it any more
    assert len(first.life().steps) == 1
    for _ in range(100):
        lives.tell(B, "resumed", "unit-0", "unavailable")
    assert len(stories[0].life().steps) == MOST_STEPS - 1
    stories[0].end(200)
    steps = stories[0].life().steps
    assert (len(steps), steps[-1].what) == (MOST_STEPS - 1, "ended")
    lives.tell(B, "queued", "unit-0")  # after its end
    assert stories[0].life().steps == steps


def test_a_life_of_many_steps_still_knows_its_state() -> None:
    story = Lives().begin("mine")
    for _ in range(MOST_STEPS):
        story.add("admitted", "unit-0")
    story.add("first_token", "unit-0")
    assert len(story.life().steps) < MOST_STEPS
    assert story.life().state == "decode"
