#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Mooncake's transfer engine, as PyPI has it: built on a distribution of Red Hat's for any Linux,
and linked to whatever libibverbs.so.1 there is. Two processes, each with a NIC; one writes to the
other's memory, which looks at every byte, and reads it back.

    process-mooncake.py DEVICE DEVICE
"""

import ctypes
import hashlib
import subprocess
import sys

ROOM = 16 << 20
SIZES = [1, 8, 4096, 65536, (1 << 20) + 3, ROOM]


def engine(device):
    from mooncake.engine import TransferEngine

    made = TransferEngine()
    failed = made.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", device)
    assert not failed, f"{device}: initialize says {failed}"
    room = ctypes.create_string_buffer(ROOM)
    address = ctypes.addressof(room)
    failed = made.register_memory(address, ROOM)
    assert not failed, f"{device}: register_memory says {failed}"
    return made, room, address


def serve(device):
    made, room, address = engine(device)
    print("ready", made.get_rpc_port(), address, flush=True)
    for line in sys.stdin:
        size = int(line)
        rest = not any(room.raw[size:])
        found = hashlib.sha256(room.raw[:size]).hexdigest()
        ctypes.memset(address, 0, ROOM)
        print("found", found, rest, flush=True)


def answer(server, kind):
    for line in server.stdout:
        if line.startswith(kind + " "):
            return line.split()[1:]
    raise SystemExit(f"the server is gone before it was {kind}")


def main(devices):
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", devices[1]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )
    try:
        port, there = answer(server, "ready")
        peer, there = f"127.0.0.1:{port}", int(there)
        made, room, here = engine(devices[0])
        for size in SIZES:
            pattern = hashlib.shake_128(str(size).encode()).digest(size)
            ctypes.memmove(here, pattern, size)
            failed = made.transfer_sync_write(peer, here, there, size)
            assert not failed, f"{size} bytes: write says {failed}"
            ctypes.memset(here, 0, ROOM)
            failed = made.transfer_sync_read(peer, here, there, size)
            assert not failed, f"{size} bytes: read says {failed}"
            assert room.raw[:size] == pattern, f"{size} bytes: read back other ones"
            print(size, file=server.stdin, flush=True)
            found, rest = answer(server, "found")
            assert found == hashlib.sha256(pattern).hexdigest(), f"{size} bytes: wrote other ones"
            assert rest == "True", f"{size} bytes: wrote more"
            print("ok", size, flush=True)
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        main(sys.argv[1:3])
