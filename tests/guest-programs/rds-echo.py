#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Datagrams of many sizes over RDS, there and back, each compared: the kernel's rds_rdma carries
them over reliable QPs of its own.

    rds-echo.py serve ADDRESS COUNT     # answers COUNT datagrams, says "ready" first
    rds-echo.py ask ADDRESS PEER COUNT
"""
import random
import socket
import sys

PORT = 4711
SIZES = (1, 63, 64, 4095, 4096, 4097, 65536, 100000)


def bound(address):
    end = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        end.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
    end.bind((address, PORT))
    end.settimeout(40)
    return end


def serve(address, count):
    end = bound(address)
    print("ready", flush=True)
    for _ in range(int(count)):
        data, peer = end.recvfrom(1 << 20)
        end.sendto(data[::-1], peer)
    # Not before the last answer has been taken: closing drops what was not acknowledged.
    end.recvfrom(1 << 20)


def ask(address, peer, count):
    end = bound(address)
    chance = random.Random(1)
    total = 0
    for n in range(int(count)):
        data = chance.randbytes(SIZES[n % len(SIZES)])
        end.sendto(data, (peer, PORT))
        back, _ = end.recvfrom(1 << 20)
        if back != data[::-1]:
            sys.exit(f"datagram {n} of {len(data)} bytes came back wrong ({len(back)} bytes)")
        total += len(data)
    end.sendto(b"end", (peer, PORT))
    print(f"{count} datagrams, {total} bytes each way")


{"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
