"""How long jobs take on a device that is not here: a 13B model on shares of an A100, and beside a 7B model.

Needs no server. docs/cost-model.md says how far such numbers are from measured ones.
"""

from __future__ import annotations

from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.cost.work import Work

LARGE, SMALL = "llama-13b", "llama-7b"


def main() -> None:
    unit = Roofline(find_device("A100-80"), 1, {name: find_shape(name) for name in (LARGE, SMALL)})

    print(f"{LARGE}     prefill of 1,024    decode step of 32")
    for share in (1.0, 0.8, 0.5, 0.3):
        prefill = unit.seconds(Work.prefill(LARGE, share, [1024]))
        decode = unit.seconds(Work.decode(LARGE, share, [512] * 32))
        print(f"{share:4.0%} of SMs      {1e3 * prefill:6.1f} ms           {1e3 * decode:6.1f} ms")

    print(f"\non half of the SMs, beside {SMALL} on the other half, times as long as alone")
    decodes = Work.decode(SMALL, 0.5, [512] * 32)
    for told, job in (
        ("a prefill beside a decode step    ", Work.prefill(LARGE, 0.5, [1024])),
        ("a decode step beside a decode step", Work.decode(LARGE, 0.5, [512] * 32)),
    ):
        print(f"{told} {unit.seconds(job, [decodes]) / unit.seconds(job):.2f}")


if __name__ == "__main__":
    main()
