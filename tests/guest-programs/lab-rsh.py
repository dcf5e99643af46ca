#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A remote shell between the guests of a lab, in the place of ssh, as mpirun's agent wants it.

    lab-rsh.py serve ADDRESS        # runs what it is told, until killed; says "ready" first
    lab-rsh.py HOST COMMAND...      # runs the command there; its output and status come back

There is no authentication: it is for a network with two guests of one lab and nothing else.
"""
import os
import socket
import subprocess
import sys

PORT = 7014
PATIENCE = 300


def answer(end):
    command = end.makefile("rb").readline().decode()
    done = subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=end.fileno(),
                          stderr=end.fileno(), timeout=PATIENCE, check=False)
    end.sendall(f"\0{done.returncode}".encode())


def serve(address):
    door = socket.create_server((address, PORT))
    print("ready", flush=True)
    while True:
        end, _ = door.accept()
        if os.fork() == 0:
            answer(end)
            os._exit(0)
        end.close()


def ask(host, command):
    end = socket.create_connection((host, PORT), timeout=PATIENCE)
    end.sendall(" ".join(command).encode() + b"\n")
    said = b""
    while more := end.recv(65536):
        said += more
    text, _, status = said.rpartition(b"\0")
    sys.stdout.buffer.write(text)
    sys.exit(int(status or 1))


if sys.argv[1] == "serve":
    serve(sys.argv[2])
else:
    ask(sys.argv[1], sys.argv[2:])
