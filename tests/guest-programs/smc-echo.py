#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A stream over SMC-R version 2, there and back, every byte compared: the kernel writes it into the
peer's buffers by RDMA.

    smc-echo.py serve ADDRESS        # answers one connection, says "ready" first
    smc-echo.py ask PEER

Version 2 joins ends of one enterprise only, whose name (UEID, net/smc/smc_clc.c) is given to the
kernel here. A connection that can not be SMC is TCP without a word; who looks at the NIC's counters
sees that.
"""
import errno
import random
import socket
import struct
import sys

IPPROTO_SMC = 256
PORT = 4712
SIZES = (1, 63, 4096, 65536, 1 << 20)
ROUNDS = 3
# Of <linux/netlink.h>, <linux/genetlink.h> and <linux/smc.h>.
REQUEST_ACK, ERROR = 5, 2
CTRL, CTRL_GETFAMILY, CTRL_ATTR_ID, CTRL_ATTR_NAME = 16, 3, 1, 2
SMC_ADD_UEID, SMC_EID_ENTRY = 10, 1


def attribute(kind, value):
    length = 4 + len(value)
    return struct.pack("HH", length, kind) + value + bytes(-length % 4)


def attributes(data):
    while len(data) >= 4:
        length, kind = struct.unpack_from("HH", data)
        yield kind, data[4:length]
        data = data[(length + 3) & ~3:]


def ask_kernel(family, command, body):
    """Sends one generic netlink request; its answer's attributes, or an errno."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 16) as link:
        link.settimeout(10)
        message = struct.pack("BBH", command, 1, 0) + body
        link.send(struct.pack("IHHII", 16 + len(message), family, REQUEST_ACK, 1, 0) + message)
        answer = link.recv(65536)
    if struct.unpack_from("H", answer, 4)[0] == ERROR:
        return -struct.unpack_from("i", answer, 16)[0]
    return dict(attributes(answer[20:]))


def join_enterprise(name):
    found = ask_kernel(CTRL, CTRL_GETFAMILY, attribute(CTRL_ATTR_NAME, b"SMC_GEN_NETLINK\0"))
    family = struct.unpack("H", found[CTRL_ATTR_ID][:2])[0]
    refused = ask_kernel(family, SMC_ADD_UEID,
                         attribute(SMC_EID_ENTRY, name.ljust(32).encode() + b"\0"))
    if refused not in (0, errno.EEXIST):
        sys.exit(f"the kernel refuses the enterprise: errno {refused}")


def stream():
    end = socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_SMC)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    end.settimeout(60)
    return end


def take(end, length):
    data = bytearray()
    while len(data) < length:
        piece = end.recv(length - len(data))
        if not piece:
            sys.exit(f"the stream ended after {len(data)} of {length} bytes")
        data += piece
    return bytes(data)


def serve(address):
    listener = stream()
    listener.bind((address, PORT))
    listener.listen()
    print("ready", flush=True)
    end, _ = listener.accept()
    end.settimeout(60)
    for size in SIZES * ROUNDS:
        end.sendall(take(end, size)[::-1])


def ask(peer):
    end = stream()
    end.connect((peer, PORT))
    chance = random.Random(2)
    for size in SIZES * ROUNDS:
        data = chance.randbytes(size)
        end.sendall(data)
        if take(end, size) != data[::-1]:
            sys.exit(f"{size} bytes came back wrong")
    print(f"{ROUNDS * sum(SIZES)} bytes each way")


join_enterprise("VRDMA.LAB")
{"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
