from kvloom.router.call import Call, Frames
from kvloom.router.fleet import Fleet
from kvloom.router.programs.options import Replicas, Tokens


async def cache_aware_disaggregate(
    call: Call, fleet: Fleet, *, prefill: Replicas = 1, slack: Tokens = 2048
) -> Frames:
    """As disaggregate, with the prefiller and the decoder that hold most of the prompt; what the decoder has
    matched is not sent."""
    prefillers, decoders = fleet.split(prefill)
    target, begin = fleet.nearest(call.prompt, decoders, slack=slack), 0
    if prefillers:
        source, begin = fleet.nearest(call.prompt, prefillers, slack=slack), -1
        spot = await call.prep_recv(target, end=-1, sender=source)
        await call.remote_send(source, spot, begin=spot.matched, end=-1)
    async for frame in call.start_generate(target, begin=begin):
        yield frame
