#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""What NCCL asks of a machine before it uses an RDMA device: NCCL itself needs a GPU.

It opens libibverbs by name, takes each function by its version (dlvsym(3); NVIDIA/nccl,
src/misc/ibvsymbols.cc), asks devices and ports by these, and reads the type of an address from the
kernel's files (src/transport/net_ib.cc).
"""
import ctypes
import os
import sys

OF_1_1 = """
get_device_list free_device_list get_device_name open_device close_device get_async_event
ack_async_event query_device query_port query_gid query_qp alloc_pd dealloc_pd reg_mr dereg_mr
create_cq destroy_cq create_qp modify_qp destroy_qp fork_init event_type_str
""".split()
LATER = {"reg_mr_iova2": "1.8", "query_ece": "1.10", "set_ece": "1.10", "reg_dmabuf_mr": "1.12"}

libc = ctypes.CDLL(None)
libc.dlvsym.restype = ctypes.c_void_p
libc.dlvsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
verbs = ctypes.CDLL("libibverbs.so.1", mode=os.RTLD_NOW)


def versioned(name, version):
    at = libc.dlvsym(verbs._handle, f"ibv_{name}".encode(), f"IBVERBS_{version}".encode())
    if not at:
        sys.exit(f"ibv_{name}@IBVERBS_{version} is not there")
    return at


names = {name: "1.1" for name in OF_1_1} | LATER
found = {name: versioned(name, version) for name, version in names.items()}


def call(name, restype, *argtypes):
    return ctypes.CFUNCTYPE(restype, *argtypes)(found[name])


pointer = ctypes.c_void_p
if call("fork_init", ctypes.c_int)():
    sys.exit("ibv_fork_init")
count = ctypes.c_int()
devices = call("get_device_list", ctypes.POINTER(pointer), pointer)(ctypes.addressof(count))
for at in range(count.value):
    name = call("get_device_name", ctypes.c_char_p, pointer)(devices[at]).decode()
    context = call("open_device", pointer, pointer)(devices[at])
    # Larger than any struct ibv_device_attr and ibv_port_attr: NCCL's are those of the first ABI.
    device, port, gid = (ctypes.create_string_buffer(size) for size in (1024, 256, 16))
    asked = call("query_device", ctypes.c_int, pointer, pointer)(context, device)
    asked |= call("query_port", ctypes.c_int, pointer, ctypes.c_uint8, pointer)(context, 1, port)
    asked |= call("query_gid", ctypes.c_int, pointer, ctypes.c_uint8, ctypes.c_int, pointer)(
        context, 1, 0, gid
    )
    state = int.from_bytes(port.raw[:4], "little")
    with open(f"/sys/class/infiniband/{name}/ports/1/gid_attrs/types/0") as file:
        kind = file.read().strip()
    if asked or state != 4 or kind != "RoCE v2" or not any(gid.raw):
        sys.exit(f"{name}: {asked} {state} {kind!r} {gid.raw!r}")
    call("close_device", ctypes.c_int, pointer)(context)
    print(f"{name}: active, {kind}")
if count.value != 2:
    sys.exit(f"{count.value} devices")
