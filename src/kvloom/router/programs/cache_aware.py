from kvloom.router.call import Call, Frames
from kvloom.router.fleet import Fleet
from kvloom.router.programs.options import Tokens


async def cache_aware(call: Call, fleet: Fleet, *, slack: Tokens = 2048) -> Frames:
    """A request goes to the replica that holds the longest prefix of it, unless that has `slack` tokens more
    to do than the least loaded."""
    async for frame in call.start_generate(fleet.nearest(call.prompt, slack=slack)):
        yield frame
