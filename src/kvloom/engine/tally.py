"""What a model's jobs and tokens come to."""

from __future__ import annotations

from kvloom.core.job import Job, Phase


class Tally:
    """Tokens, preemptions and jobs since the start. active: jobs that run now. last: the unit's count when a
    job last began or ended. changes: how often one of these two has changed."""

    def __init__(self) -> None:
        self.jobs: dict[Phase, int] = dict.fromkeys(Phase, 0)
        self.active: dict[Phase, int] = dict.fromkeys(Phase, 0)
        self.last: dict[Phase, int] = dict.fromkeys(Phase, 0)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.received_tokens = 0
        self.output_tokens = 0
        self.away_tokens = 0
        self.preemptions = 0
        self.changes = 0

    def started(self, phase: Phase, now: int) -> None:
        """A job has started, the unit's `now`-th."""
        self.changes += 1
        self.jobs[phase] += 1
        self.active[phase] += 1
        self.last[phase] = now

    def finished(self, job: Job, drawn: int, steps: int, now: int) -> None:
        """A job has ended well: it drew `drawn` tokens in `steps` steps, each as good as a job. now: jobs
        that the unit has started."""
        self.changes += 1
        self.active[job.phase] -= 1
        self.jobs[job.phase] += steps - 1
        self.last[job.phase] = now
        self.output_tokens += drawn
        if job.phase is Phase.PREFILL:
            self.prompt_tokens += job.tokens.size

    def failed(self, job: Job) -> None:
        """A job has ended as if it had never been."""
        self.changes += 1
        self.active[job.phase] -= 1
