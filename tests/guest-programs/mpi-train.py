#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Two MPI ranks train a small network, each on half of the data: `mpi-train.py`.

The gradients are summed by MPI after each step, so both ranks have the same weights all the time.
Rank 0 writes `loss N VALUE` for every step, with all digits: two runs agree to the last bit or one
of them lost data. Ends with a status that is not 0 if the ranks part or nothing was learnt.
"""
import array
import math
import random

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
RANK = WORLD.Get_rank()
INPUTS, HIDDEN, STEPS, SAMPLES, RATE = 24, 64, 40, 6, 0.01


def sample(seed):
    """A point, and which side of a curved surface it is on."""
    source = random.Random(seed)
    point = [source.uniform(-1, 1) for _ in range(INPUTS)]
    return point, 1.0 if point[0] * point[1] + point[2] > 0 else -1.0


def weights():
    source = random.Random(1)
    count = INPUTS * HIDDEN + HIDDEN
    return array.array("d", (source.gauss(0, 0.3) for _ in range(count)))


def step(model, samples):
    """The sum of losses, and the gradient behind it in one array."""
    gradient = array.array("d", bytes(8 * (len(model) + 1)))
    head = INPUTS * HIDDEN
    for point, wanted in samples:
        hidden = [math.tanh(sum(map(float.__mul__, model[h * INPUTS:(h + 1) * INPUTS], point)))
                  for h in range(HIDDEN)]
        fault = math.tanh(sum(map(float.__mul__, model[head:], hidden))) - wanted
        gradient[len(model)] += fault * fault
        slope = 2 * fault * (1 - (fault + wanted) ** 2)
        for h, value in enumerate(hidden):
            gradient[head + h] += slope * value
            back = slope * model[head + h] * (1 - value * value)
            for i, x in enumerate(point):
                gradient[h * INPUTS + i] += back * x
    return gradient


def train():
    model = weights()
    losses = []
    samples = [sample(seed) for seed in range(RANK, 2 * SAMPLES, 2)]
    both = array.array("d", bytes(8 * (len(model) + 1)))
    for number in range(STEPS):
        WORLD.Allreduce(step(model, samples), both, MPI.SUM)
        losses.append(both[len(model)])
        if RANK == 0:
            print(f"loss {number} {losses[-1]!r}", flush=True)
        for n in range(len(model)):
            model[n] -= RATE * both[n]
    return model, losses


trained, seen = train()
models = WORLD.allgather(trained.tobytes())
if models[0] != models[1] or not seen[-1] < seen[0] / 2:
    print(f"rank {RANK}: the same weights: {models[0] == models[1]}, losses {seen[0]} {seen[-1]}")
    WORLD.Abort(1)
if RANK == 0:
    print("ok training", flush=True)
