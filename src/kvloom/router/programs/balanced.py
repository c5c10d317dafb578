from kvloom.router.call import Call, Frames
from kvloom.router.fleet import Fleet
from kvloom.router.programs.options import Ratio, Replicas


async def balanced(
    call: Call, fleet: Fleet, *, prefill: Replicas = 1, ratio: Ratio | None = None, most: Ratio = 0.5
) -> Frames:
    """As disaggregate, but the decoder computes the last `ratio` of the prompt; without a ratio, half of
    what the prefiller has waiting more than the decoder, up to `most` of the prompt."""
    prefillers, decoders = fleet.split(prefill)
    target, begin = fleet.least_loaded(decoders), 0
    if prefillers:
        source, length = fleet.least_loaded(prefillers), len(call.prompt)
        if ratio is None:
            ratio = min(most, max(0, source.queue - target.queue) / 2 / length)
        begin = min(length - 1, round(length * (1 - ratio)))
    if begin:
        spot = await call.prep_recv(target, end=begin, sender=source)
        await call.remote_send(source, spot, begin=spot.matched, end=begin)
    async for frame in call.start_generate(target, begin=begin):
        yield frame
