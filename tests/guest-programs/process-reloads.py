#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A program that loads libibverbs, uses a device and unloads it, again and again, as one does whose
plugins do: no mapping and no descriptor more is left each time."""

import _ctypes
import ctypes
import os
import sys

LIBRARY = "libibverbs.so.1"


def turn():
    verbs = ctypes.CDLL(LIBRARY, use_errno=True)
    pointer = ctypes.c_void_p
    verbs.ibv_get_device_list.restype = ctypes.POINTER(pointer)
    verbs.ibv_open_device.restype = verbs.ibv_create_cq.restype = pointer
    devices = verbs.ibv_get_device_list(None)
    context = pointer(verbs.ibv_open_device(pointer(devices[0])))
    assert context.value, ctypes.get_errno()
    cq = pointer(verbs.ibv_create_cq(context, 16, None, None, 0))
    assert cq.value, ctypes.get_errno()
    assert verbs.ibv_destroy_cq(cq) == 0
    assert verbs.ibv_close_device(context) == 0
    verbs.ibv_free_device_list(devices)
    _ctypes.dlclose(verbs._handle)


def left():
    with open("/proc/self/maps", encoding="utf-8") as maps:
        pieces = sum("/memfd:vhost-rdma" in line for line in maps)
    return pieces, len(os.listdir("/proc/self/fd"))


turn()
before = left()
for _ in range(10):
    turn()
if left() != before:
    sys.exit(f"pieces and descriptors were {before}, and are {left()}")
