#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Holds what `rdma resource show` and `rdma statistic` say against objects that this program made
itself.

    resources-check.py DEVICE GID_INDEX

The kernel lists objects of processes by process and those of the kernel by module; a driver can
spoil both (numbers that are not set, objects that the core does not know). Prints "ok NAME" or
"fail NAME: why" for each kind of object; exit status 0 only if all were right.
"""
import json
import os
import subprocess
import sys
import time

from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
import pyverbs.enums as e

NAME, GID = sys.argv[1], int(sys.argv[2])
FAILED = []


def rdma(*args):
    out = subprocess.run(["rdma", "-j", *args], check=True, capture_output=True, text=True).stdout
    return json.loads(out) if out.strip() else []


def mine(kind):
    return [o for o in rdma("resource", "show", kind)
            if o.get("pid") == os.getpid() and o.get("ifname") == NAME]


def check(name, found, **wanted):
    """One of the objects has all these values, and the name of this program."""
    wanted["comm"] = open("/proc/self/comm").read().strip()
    if any(all(str(o.get(k)).lower() == str(v).lower() for k, v in wanted.items()) for o in found):
        print(f"ok {name}", flush=True)
    else:
        FAILED.append(name)
        print(f"fail {name}: nothing is {wanted} among {found}", flush=True)


def that(name, holds, told):
    if holds:
        print(f"ok {name}", flush=True)
    else:
        FAILED.append(name)
        print(f"fail {name}: {told}", flush=True)


def to_rts(qp, gid):
    """Connected to itself."""
    attr = QPAttr(port_num=1)
    attr.dest_qp_num = qp.qp_num
    attr.path_mtu = e.IBV_MTU_1024
    attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
    attr.min_rnr_timer = 12
    attr.timeout, attr.retry_cnt, attr.rnr_retry = 14, 2, 2
    attr.rq_psn = attr.sq_psn = 77
    attr.ah_attr = AHAttr(gr=GlobalRoute(dgid=gid, sgid_index=GID), is_global=1, port_num=1)
    qp.to_rts(attr)


def counter(path):
    return int(open(f"/sys/class/infiniband/{NAME}/{path}").read())


def objects(ctx):
    pd = PD(ctx)
    cq = CQ(ctx, 100)
    mr = MR(pd, 12345, e.IBV_ACCESS_LOCAL_WRITE)
    srq = SRQ(pd, SrqInitAttr(SrqAttr(max_wr=10)))
    cap = QPCap(max_send_wr=5, max_recv_wr=5)
    qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap))
    shared = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap, srq=srq))
    to_rts(qp, ctx.query_gid(1, GID))
    return pd, cq, mr, srq, qp, shared


def numbers(pd, cq, mr, srq, qp, shared):
    check("qp connected", mine("qp"), lqpn=qp.qp_num, rqpn=qp.qp_num, type="RC", state="RTS",
          **{"sq-psn": 77, "rq-psn": 77})
    check("qp reset", mine("qp"), lqpn=shared.qp_num, type="RC", state="RESET")
    check("cq", mine("cq"), cqe=cq.cqe, users=4)
    check("mr", mine("mr"), mrlen=12345)
    check("pd", mine("pd"), users=4)
    check("ctx", mine("ctx"))
    check("srq", mine("srq"), type="BASIC", lqpn=[str(shared.qp_num)])


def listener():
    """A process of another name, whose listening ID belongs to no device: it listens on all."""
    server = subprocess.Popen(["rping", "-s", "-p", "7471"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    found = []
    while not found and time.monotonic() < deadline:
        time.sleep(0.2)
        found = [o for o in rdma("resource", "show", "cm_id") if o.get("pid") == server.pid]
    server.kill()
    server.wait()
    wanted = {"comm": "rping", "state": "LISTEN", "ps": "TCP", "src-addr": "0.0.0.0:7471"}
    that("cm_id", any(wanted.items() <= o.items() for o in found), found)


def kernel():
    """QP 1 belongs to the core: it is named by module, and has no process."""
    gsi = [o for o in rdma("resource", "show", "qp")
           if o.get("ifname") == NAME and o.get("type") == "GSI"]
    that("kernel: GSI",
         [(o.get("lqpn"), o.get("comm"), o.get("pid")) for o in gsi] == [(1, "ib_core", None)], gsi)
    for kind in ("cq", "pd"):
        kernels = [o for o in rdma("resource", "show", kind)
                   if o.get("ifname") == NAME and o.get("pid") is None]
        that(f"kernel: {kind}", kernels and all(o.get("comm") == "ib_core" for o in kernels),
             kernels)
    summary = [o for o in rdma("resource", "show") if o.get("ifname") == NAME][0]
    for kind in ("pd", "cq", "qp", "mr", "ctx", "cm_id", "srq"):
        shown = [o for o in rdma("resource", "show", kind) if o.get("ifname") == NAME]
        # Objects of the kernel are seen by root only, and root we are.
        that(f"summary: {kind}", summary.get(kind) == len(shown), (summary, shown))


def statistics():
    before = {path: counter(path)
              for path in ("ports/1/hw_counters/tx_bytes", "ports/1/hw_counters/rx_messages",
                           "hw_counters/completions", "hw_counters/commands")}
    server = subprocess.Popen(["ibv_rc_pingpong", "-d", NAME, "-g", str(GID), "-n", "100",
                               "-p", "20001"], stdout=subprocess.DEVNULL)
    time.sleep(2)
    subprocess.run(["ibv_rc_pingpong", "-d", NAME, "-g", str(GID), "-n", "100",
                    "-p", "20001", "127.0.0.1"],
                   check=True, stdout=subprocess.DEVNULL, timeout=60)
    server.wait(60)
    # Values are as old as `lifespan` at most, in milliseconds.
    life = max(counter("hw_counters/lifespan"), counter("ports/1/hw_counters/lifespan"))
    that("statistic: staleness is bounded", 0 < life <= 100, life)
    time.sleep(life / 1000 + 0.001)
    grown = {path: counter(path) - old for path, old in before.items()}
    that("statistic: tx_bytes",
         2 * 100 * 4096 <= grown["ports/1/hw_counters/tx_bytes"] < 2 * 101 * 4096, grown)
    that("statistic: rx_messages", grown["ports/1/hw_counters/rx_messages"] >= 200, grown)
    that("statistic: completions", grown["hw_counters/completions"] >= 400, grown)
    that("statistic: commands", grown["hw_counters/commands"] >= 20, grown)
    time.sleep(0.2)
    shown = [o for o in rdma("statistic", "show", "link", f"{NAME}/1")]
    port = f"/sys/class/infiniband/{NAME}/ports/1/hw_counters"
    names = {n for n in os.listdir(port) if n != "lifespan"}
    that("statistic: rdma shows the port's counters",
         len(shown) == 1 and names <= set(shown[0]), (names, shown))
    that("statistic: rdma shows their values",
         len(shown) == 1
         and shown[0].get("tx_bytes") == counter("ports/1/hw_counters/tx_bytes"), shown)


def main():
    with Context(name=NAME) as ctx:
        made = objects(ctx)
        numbers(*made)
        listener()
        kernel()
        statistics()
        sys.stdout.flush()
    # Without the destructors of half a library.
    os._exit(1 if FAILED else 0)


main()
