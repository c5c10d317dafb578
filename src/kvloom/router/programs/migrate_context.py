from kvloom.router.call import Call, Frames
from kvloom.router.fleet import Fleet
from kvloom.router.programs.options import Tokens


async def migrate_context(call: Call, fleet: Fleet, *, slack: Tokens = 256) -> Frames:
    """A request goes to where its context is; where that has `slack` tokens more to do than the least loaded
    replica, the context moves there first."""
    held, target, begin = fleet.matched(call.prompt), fleet.least_loaded(), 0
    source = max(held, key=lambda replica: held[replica], default=target)
    if source.load <= target.load + slack:
        target = source
    elif held[source] > held.get(target, 0):
        begin = min(held[source], len(call.prompt) - 1)
        spot = await call.prep_recv(target, end=begin, sender=source)
        await call.remote_send(source, spot, begin=spot.matched, end=begin)
    async for frame in call.start_generate(target, begin=begin):
        yield frame
