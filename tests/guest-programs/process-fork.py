#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""fork() and NICs for processes: a child has no part in its parent's device, and may open its own.

The parent's device goes on whatever the child does: destroys what it inherited, opens, ends.
"""
import os
import sys

from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError

LEN = 1 << 16
# IBV_ACCESS_LOCAL_WRITE, which not all releases of pyverbs have in one place.
LOCAL_WRITE = 1


def use(context):
    """Queue, domain, region: rings, a doorbell page and memory are shared with the device."""
    pd = PD(context)
    made = [CQ(context, 100), pd, MR(pd, LEN, LOCAL_WRITE)]
    made[2].write(b"x" * LEN, LEN)
    return made


def child(inherited, pd):
    try:
        MR(pd, LEN, LOCAL_WRITE)
        return 10
    except PyverbsRDMAError:
        pass
    if inherited.query_device().max_qp == 0:
        return 11
    own = Context(name=sys.argv[1])
    use(own)
    return 0


def main():
    context = Context(name=sys.argv[1])
    first = use(context)
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            status = 12
            try:
                status = child(context, first[1])
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        if status != 0:
            sys.exit(f"the child ended with {status:#x}")
        use(context)
    print("fork: ok")


main()
