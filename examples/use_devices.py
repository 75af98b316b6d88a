"""Devices for this very process, before a framework is imported.

ANYACCEL_MACHINE=sim:H100:2 python examples/use_devices.py
"""

import os

import anyaccel

with anyaccel.use("GPU:1", note="example") as devices:
    print("this process sees", os.environ["CUDA_VISIBLE_DEVICES"])
    print("and holds", anyaccel.current().devices[0].type)
    try:
        anyaccel.acquire("GPU:2", wait=0)
    except anyaccel.NeverFitsError as error:
        print("inside, more is not to be had:", error)
print("given back:", "CUDA_VISIBLE_DEVICES" not in os.environ)
