from kvloom.router.call import Call, Frames
from kvloom.router.fleet import Fleet


async def data_parallel(call: Call, fleet: Fleet) -> Frames:
    """Requests go to the replicas in turn."""
    async for frame in call.start_generate(fleet.turn()):
        yield frame
