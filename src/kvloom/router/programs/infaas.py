from kvloom.router.call import Call, Frames
from kvloom.router.fleet import Fleet


async def infaas(call: Call, fleet: Fleet) -> Frames:
    """INFaaS++ (Llumnix, section 6.1): each request goes where the unit has least memory in use."""
    async for frame in call.start_generate(fleet.emptiest()):
        yield frame
