#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs rdma-core's own Python suite, unmodified, one process per test.

Why a process each: in one process the suite dies in Python's garbage collector (pyverbs objects of
skipped tests are taken apart half made), and every result after that is lost; so a crash or a hang
costs one test here. All modules are loaded once, then each test is a fork of that process. Nothing
is shared over the fork: a test opens its device in its own setUp.

Each outcome is one line of JSON in the result file, as soon as it is known:
    {"name": "test_mr.MRTest.test_reg_mr", "outcome": "ok", "reason": "", "seconds": 0.1}
`outcome` is ok, skip, fail (an assertion), error (any other exception), crash (a signal, or an end
without an answer) or timeout. The first line is {"tests": N}. The suite reads the device's name
from the command line, as its own run_tests.py does.
"""
import argparse
import json
import os
import re
import select
import signal
import sys
import time
import unittest
import warnings


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True,
                        help="directory that has the `tests` directory of the suite")
    parser.add_argument("--dev", required=True)
    parser.add_argument("--results", required=True, help="file of JSON lines to write")
    parser.add_argument("--only", default="",
                        help="regular expression that a test's name must match")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60)
    return parser.parse_args()


def load(directory, device):
    """All tests of the suite, in its own order."""
    root = os.path.join(directory, "tests")
    sys.path[:0] = [directory, root]
    sys.argv[1:] = ["--dev", device]
    from args_parser import parser
    parser.parse_args()
    # Suites before rdma-core 51 pass an argument that Python 3.12 took out.
    loads = unittest.TestLoader.loadTestsFromModule
    unittest.TestLoader.loadTestsFromModule = lambda loader, module, *_, pattern=None: loads(
        loader, module, pattern=pattern
    )
    import tests
    return flatten(unittest.defaultTestLoader.loadTestsFromModule(tests))


def flatten(suite):
    found = []
    for item in suite:
        found.extend(flatten(item) if isinstance(item, unittest.TestSuite) else [item])
    return found


def short(test):
    return test.id().removeprefix("tests.")


def last_line(traceback_text):
    lines = [line.strip() for line in traceback_text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def judge(test):
    """Runs a test in this process: its outcome and why."""
    result = unittest.TestResult()
    unittest.TestSuite([test]).run(result)
    for outcome, found in (("error", result.errors), ("fail", result.failures)):
        if found:
            print(f"---- {short(test)}: {outcome}\n{found[0][1]}", flush=True)
            return outcome, last_line(found[0][1])
    if result.unexpectedSuccesses:
        return "fail", "unexpected success"
    if result.skipped:
        return "skip", result.skipped[0][1]
    if result.testsRun != 1:
        return "error", f"{result.testsRun} tests ran instead of one"
    return "ok", ""


def child(test, channel):
    os.setsid()
    outcome, reason = judge(test)
    os.write(channel, json.dumps({"outcome": outcome, "reason": reason}).encode())
    sys.stdout.flush()
    # Neither exit handlers nor destructors: what a process leaves open is the kernel driver's to
    # clean up, and a good test of it.
    os._exit(0)


def answer(pid, channel, deadline):
    """What the child wrote, whole; None if it was not done at the deadline, empty if it ended
    without a word."""
    text = b""
    pidfd = os.pidfd_open(pid)
    try:
        # The other processes of a test hold the pipe too: neither its end nor theirs counts, only
        # the record's and the child's.
        while not text.endswith(b"}"):
            ready = select.select([channel, pidfd], [], [], max(0, deadline - time.monotonic()))[0]
            if not ready:
                return None
            if channel not in ready:
                return b""
            piece = os.read(channel, 65536)
            if not piece:
                return b""
            text += piece
        return text
    finally:
        os.close(pidfd)


def reap(pid, patience):
    """Ends the test's whole process group, the leader by itself if it does so in time; the leader's
    wait status."""
    deadline = time.monotonic() + patience
    done, status = os.waitpid(pid, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        time.sleep(0.01)
        done, status = os.waitpid(pid, os.WNOHANG)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return status if done else os.waitpid(pid, 0)[1]


def run(test, limit):
    readable, writable = os.pipe()
    sys.stdout.flush()
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        child(test, writable)
    os.close(writable)
    text = answer(pid, readable, start + limit)
    os.close(readable)
    status = reap(pid, 0 if text is None else 2)
    if text is None:
        record = {"outcome": "timeout", "reason": f"no end within {limit:.0f} s"}
    elif text:
        record = json.loads(text)
    elif os.WIFSIGNALED(status):
        record = {"outcome": "crash", "reason": f"signal {os.WTERMSIG(status)}"}
    else:
        record = {"outcome": "crash", "reason": f"exit status {os.WEXITSTATUS(status)}"}
    return {"name": short(test), **record, "seconds": round(time.monotonic() - start, 2)}


def main():
    args = arguments()
    warnings.simplefilter("ignore")
    tests = [t for t in load(args.dir, args.dev) if re.search(args.only, short(t))]
    with open(args.results, "w", buffering=1) as results:
        results.write(json.dumps({"tests": len(tests) * args.repeat}) + "\n")
        for _ in range(args.repeat):
            for test in tests:
                record = run(test, args.timeout)
                results.write(json.dumps(record) + "\n")
                if record["outcome"] not in ("ok", "skip"):
                    print(f'{record["outcome"]:8} {record["name"]}: {record["reason"]}', flush=True)


main()
