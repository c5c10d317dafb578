"""Log-probabilities of a prompt: once, whole, and before any token."""

from __future__ import annotations

from tests.engine.plays import check, order, serve
from tests.modelled import ModelledExecutor, ask, engine_over


def test_a_preempted_choice_does_not_report_the_prompt_again() -> None:
    executor = ModelledExecutor(40, models=("wide",))
    engine = engine_over(executor, max_running=4)

    async def play() -> None:
        body = order("r", "wide", 9, n=6, max_tokens=20, prompt_logprobs=0)
        answer = await ask(engine, body)
        assert (await engine.load()).models["wide"].preemptions_total > 0
        check(executor, body, answer, whole=True)

    serve(play(), engine, executor)
