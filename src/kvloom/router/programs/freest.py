from kvloom.router.call import Call, Frames
from kvloom.router.fleet import Fleet


async def freest(call: Call, fleet: Fleet) -> Frames:
    """Each request goes to the replica whose unit has room for most decode steps of its batch."""
    async for frame in call.start_generate(fleet.freest()):
        yield frame
