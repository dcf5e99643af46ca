# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Lays what the netlink crate says of a namespace beside what iproute2 says:
rdma-compare.py RDMA-JSON DEVICE NETNS"""

import json, os, re, subprocess, sys

tool, device, netns = sys.argv[1:]
ours = json.loads(subprocess.check_output([tool, "show", netns]))
inside = ["ip", "netns", "exec", os.path.basename(netns)]


def text(*args):
    return subprocess.check_output(inside + list(args), text=True)


def theirs(*args):
    said = text(*args).strip()
    try:
        return json.loads(said or "[]")
    except ValueError:
        sys.exit(f"{' '.join(args)} does not print JSON: {said[:200]!r}")


bad = []
compared = 0


def same(what, a, b):
    global compared
    compared += 1
    if str(a).lower() != str(b).lower():
        bad.append(f"{what}: ours {a!r}, theirs {b!r}")


mine = [entry for entry in ours["devices"] if entry["device"]["name"] == device]
assert len(mine) == 1, ours
mine = mine[0]
# Plain text: not every version of the tool has JSON for this.
mode = re.search(r'netns"?:?\s*"?(\w+)', text("rdma", "system", "show"))
same("mode", ours["system"]["netns_mode"], mode and mode[1])
listed = theirs("rdma", "-j", "dev", "show")
same("devices", sorted(e["device"]["name"] for e in ours["devices"]),
     sorted(e["ifname"] for e in listed))
dev = next(e for e in listed if e["ifname"] == device)
same("index", mine["device"]["index"], dev["ifindex"])
for a, b in (("node_guid", "node_guid"), ("system_image_guid", "sys_image_guid"),
             ("node_type", "node_type")):
    same(a, mine["device"][a], dev[b])
link = next(e for e in theirs("rdma", "-j", "link", "show") if e["ifname"] == device)
port = mine["ports"][0]
for a, b in (("port", "port"), ("state", "state"), ("physical_state", "physical_state"),
             ("netdev", "netdev"), ("netdev_index", "netdev_index")):
    same("port " + a, port[a], link[b])
for kind, number in (("qp", "lqpn"), ("cq", "cqn"), ("mr", "mrn"), ("pd", "pdn"),
                     ("ctx", "ctxn"), ("srq", "srqn"), ("cm_id", "cm-idn")):
    there = [e for e in theirs("rdma", "-j", "resource", "show", kind) if e.get("ifname") == device]
    same(f"number of {kind}", len(mine[kind]), len(there))
summary = next(e for e in theirs("rdma", "-j", "resource", "show") if e["ifname"] == device)
for count in mine["counts"]:
    same("count of " + count["name"], count["current"], summary.get(count["name"], "absent"))
for interface in theirs("ip", "-j", "-d", "link", "show"):
    own = next((i for i in ours["interfaces"] if i["name"] == interface["ifname"]), None)
    if own is None:
        bad.append("no interface " + interface["ifname"])
        continue
    same(own["name"] + " index", own["index"], interface["ifindex"])
    same(own["name"] + " mtu", own["mtu"], interface["mtu"])
    same(own["name"] + " address", own["address"], interface["address"])
    same(own["name"] + " state", own["state"], interface["operstate"])
    same(own["name"] + " up", own["up"], "UP" in interface["flags"])
print(f"{compared} values compared")
if bad:
    sys.exit("\n".join(bad))
