#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Two MPI ranks that compare every byte: `mpi-check.py PART...`, parts `messages` and `windows`.

Rank 0 writes `ok PART`; a wrong byte or number ends both ranks with a status that is not 0.
"""
import array
import random
import sys

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
RANK = WORLD.Get_rank()
PEER = 1 - RANK
SIZES = (0, 1, 63, 1024, 8191, 65536, 1 << 20)
ROUNDS = 3
WORDS = 4096


def must(holds, what):
    if not holds:
        print(f"rank {RANK}: wrong: {what}", flush=True)
        WORLD.Abort(1)


def noise(seed, size):
    return bytearray(random.Random(seed).randbytes(size))


def pingpong():
    for size in SIZES:
        for turn in range(ROUNDS):
            sent, back = noise(size + turn, size), bytearray(size)
            if RANK == 0:
                WORLD.Send(sent, PEER, tag=turn)
                WORLD.Recv(back, PEER, tag=turn)
                must(back == sent[::-1], f"{size} bytes came back")
            else:
                WORLD.Recv(back, PEER, tag=turn)
                must(back == sent, f"{size} bytes came")
                WORLD.Send(back[::-1], PEER, tag=turn)


def both_ways():
    size = 1 << 18
    mine, theirs = noise(RANK, size), bytearray(size)
    requests = [WORLD.Irecv(theirs, PEER, tag=9), WORLD.Isend(mine, PEER, tag=9)]
    MPI.Request.Waitall(requests)
    must(theirs == noise(PEER, size), "both ways at once")


def collectives():
    for count in (1, 1000, 100_000):
        mine = array.array("q", ((RANK + 1) * n for n in range(count)))
        both = array.array("q", bytes(8 * count))
        WORLD.Allreduce(mine, both, MPI.SUM)
        must(all(both[n] == 3 * n for n in range(count)), f"sum of {count}")
        WORLD.Allreduce(mine, both, MPI.MAX)
        must(all(both[n] == 2 * n for n in range(count)), f"maximum of {count}")
    text = noise(7, 100_000) if RANK == 1 else bytearray(100_000)
    WORLD.Bcast(text, root=1)
    must(text == noise(7, 100_000), "broadcast")
    two = bytearray(2 * 5000)
    WORLD.Allgather(noise(RANK, 5000), two)
    must(two == noise(0, 5000) + noise(1, 5000), "allgather")


def messages():
    pingpong()
    both_ways()
    collectives()


def word(value=0):
    return array.array("q", [value])


def numbers_of(rank, times=1):
    return array.array("q", (times * (rank * 1_000_000 + n) for n in range(WORDS)))


def puts_and_gets(window, memory):
    numbers = numbers_of(RANK)
    there = array.array("q", bytes(8 * WORDS))
    window.Fence()
    window.Put(numbers, PEER)
    window.Fence()
    must(array.array("q", bytes(memory)) == numbers_of(PEER), "put")
    window.Get(there, PEER)
    window.Fence()
    must(there == numbers, "get")
    window.Accumulate(numbers, PEER, op=MPI.SUM)
    window.Fence()
    must(array.array("q", bytes(memory)) == numbers_of(PEER, 2), "accumulate")


def counters(window, memory):
    """Both ranks count in rank 0's memory: every number must be drawn once."""
    memory[:16] = bytes(16)
    WORLD.Barrier()
    window.Lock_all()
    drawn = []
    for _ in range(100):
        old = word()
        window.Fetch_and_op(word(1), old, 0, 0, op=MPI.SUM)
        window.Flush(0)
        drawn.append(old[0])
    swaps = 0
    for turn in range(50):
        old = word()
        window.Compare_and_swap(word(turn + 1), word(turn), old, 0, 1)
        window.Flush(0)
        swaps += old[0] == turn
    window.Unlock_all()
    everyone = WORLD.allgather(drawn)
    must(sorted(everyone[0] + everyone[1]) == list(range(200)), "fetch and add")
    must(drawn == sorted(drawn), "fetch and add in order")
    # Each value was swapped in by one rank at most, and the first by one.
    last = word()
    window.Lock(0)
    window.Get(last, 0, 1)
    window.Unlock(0)
    must(WORLD.allreduce(swaps) == last[0] > 0, "compare and swap")


def window_life(make):
    window, memory = make()
    puts_and_gets(window, memory)
    counters(window, memory)
    window.Free()


def allocated():
    window = MPI.Win.Allocate(8 * WORDS, disp_unit=8, comm=WORLD)
    return window, window.tomemory()


def created():
    memory = bytearray(8 * WORDS)
    return MPI.Win.Create(memory, disp_unit=8, comm=WORLD), memoryview(memory)


def windows():
    window_life(created)
    window_life(allocated)


for part in sys.argv[1:]:
    {"messages": messages, "windows": windows}[part]()
    WORLD.Barrier()
    if RANK == 0:
        print(f"ok {part}", flush=True)
