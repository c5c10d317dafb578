from kvloom.router.call import Call, Frames
from kvloom.router.fleet import Fleet
from kvloom.router.programs.options import Replicas


async def disaggregate(call: Call, fleet: Fleet, *, prefill: Replicas = 1) -> Frames:
    """The first `prefill` replicas prefill, the others decode, each in turn."""
    prefillers, decoders = fleet.split(prefill)
    target, begin = fleet.turn(decoders), 0
    if prefillers:
        source, begin = fleet.turn(prefillers), -1
        spot = await call.prep_recv(target, end=-1, sender=source)
        await call.remote_send(source, spot, end=-1)
    async for frame in call.start_generate(target, begin=begin):
        yield frame
