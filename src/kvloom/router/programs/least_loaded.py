from kvloom.router.call import Call, Frames
from kvloom.router.fleet import Fleet


async def least_loaded(call: Call, fleet: Fleet) -> Frames:
    """Each request goes to the replica that has least to do."""
    async for frame in call.start_generate(fleet.least_loaded()):
        yield frame
