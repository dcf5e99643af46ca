//! The network interface that the RDMA device belongs to: down, renamed, with another address, gone.
//!
//! What leaves its addresses must not harm programs. A new MAC address makes the kernel set up its GIDs anew, in other entries of the table: connections by
//! the old entries end, as they do with other RNICs. What takes the interface away takes the RDMA device too.

use std::time::Instant;

use anyhow::Result;
use serde_json::json;

use super::{Life, NICS, SHORT};
use crate::vm::guest::{self, Job};

/// The addresses that a guest's init gave its interface; they went with it or with its link. `$i` is the interface.
const ADDRESSES: &str = "
ip=$(hostname | tr ab 12)
echo 0 > /proc/sys/net/ipv6/conf/$i/accept_dad
ip link set $i up
ip addr replace 10.9.0.$ip/24 dev $i
ip -6 addr replace fd00:9::$ip/64 dev $i nodad
";

/// Runs `{doing}` and waits for a line of a program that prints asynchronous events.
const EVENT: &str = "
n=0
until grep -qi '{event}' /tmp/events; do sleep 0.1; n=$((n+1)); [ $n -lt 200 ] || { cat /tmp/events; ibv_devinfo; exit 1; }; done
ibv_devinfo -d {dev} | grep {state}
";

const NEW_MAC: &str = "52:54:00:00:99:01";

impl Life {
    fn watch_events(&mut self) -> Result<Job> {
        let dev = self.devices.name(0).to_owned();
        let guest = self.guest(0)?;
        let job =
            guest.spawn(&format!("exec stdbuf -oL ibv_asyncwatch -d {dev} > /tmp/events 2>&1"))?;
        guest.must("n=0; until grep -q async.event /tmp/events; do sleep 0.1; n=$((n+1)); [ $n -lt 100 ] || exit 1; done", SHORT)?;
        Ok(job)
    }

    fn must_see(&mut self, event: &str, state: &str) -> Result<()> {
        let script = EVENT
            .replace("{event}", event)
            .replace("{state}", state)
            .replace("{dev}", self.devices.name(0));
        self.guest(0)?.must(&script, SHORT).map(|_| ())
    }

    pub(super) fn interface(&mut self) -> Result<()> {
        let watch = self.watch_events()?;
        self.guest(0)?.must("ip link set eth0 down", SHORT)?;
        self.must_see("port.err", "PORT_DOWN")?;
        self.guest(0)?.must(&format!("i=eth0{ADDRESSES}"), SHORT)?;
        self.must_see("port.active", "PORT_ACTIVE")?;
        self.guest(0)?.kill(watch)?;
        self.reattach()
    }

    pub(super) fn cable(&mut self) -> Result<()> {
        let (client, server) = self.load()?;
        let watch = self.watch_events()?;
        self.guest(0)?.monitor()?.execute("set_link", &json!({ "name": "net", "up": false }))?;
        self.must_see("port.err", "PORT_DOWN")?;
        self.guest(0)?.monitor()?.execute("set_link", &json!({ "name": "net", "up": true }))?;
        self.must_see("port.active", "PORT_ACTIVE")?;
        self.guest(0)?.kill(watch)?;
        // The cable of the companion carries no RDMA traffic between guests of one host.
        self.must_flow()?;
        self.guest(0)?.kill(client)?;
        self.end(1, server)?;
        self.reattach()
    }

    pub(super) fn rename(&mut self) -> Result<()> {
        let (client, server) = self.load()?;
        let rename = |from: &str, to: &str| {
            format!("ip link set {from} down && ip link set {from} name {to}; i={to}{ADDRESSES}")
        };
        self.guest(0)?.must(&rename("eth0", "lan7"), SHORT)?;
        self.must_flow()?;
        self.reattach()?;
        let dev = self.devices.name(0).to_owned();
        self.guest(0)?.must(&format!("rdma link show {dev}/1 | grep 'netdev lan7'"), SHORT)?;
        self.both_work()?;
        self.guest(0)?.must(&rename("lan7", "eth0"), SHORT)?;
        self.must_flow()?;
        self.guest(0)?.kill(client)?;
        self.end(1, server)?;
        self.reattach()
    }

    pub(super) fn change_mac(&mut self) -> Result<()> {
        let (client, server) = self.load()?;
        let change = |mac: &str| {
            format!("ip link set eth0 down && ip link set eth0 address {mac}; i=eth0{ADDRESSES}")
        };
        self.guest(0)?.must(&change(NEW_MAC), SHORT)?;
        self.must_end(0, client)?;
        self.end(1, server)?;
        self.reattach()?;
        self.both_work()?;
        // A driver that starts now still finds it, by the address that it was born with.
        self.remove_driver(0)?;
        self.guest(0)?.must(super::drivers::LOAD, SHORT)?;
        self.reattach()?;
        self.both_work()?;
        self.guest(0)?.must(&change(&guest::mac(1)), SHORT)?;
        self.reattach()
    }

    pub(super) fn replug_netdev(&mut self) -> Result<()> {
        let holders = self.hold(0, &["poll", "sleep", "busy"])?;
        let mut monitor = self.guest(0)?.monitor()?;
        let start = Instant::now();
        monitor.unplug("net")?;
        self.must_flush(0, &holders, start, SHORT)?;
        self.guest(0)?.must(
            "n=0; while [ -n \"$(ls /sys/class/infiniband)\" ]; do sleep 0.1; n=$((n+1)); [ $n -lt 100 ] || exit 1; done",
            SHORT,
        )?;
        self.wait_empty(NICS[0], true)?;
        let device = json!({ "driver": "virtio-net-pci", "id": "net", "bus": "rp1", "netdev": "vrnet0", "mac": guest::mac(1) });
        monitor.execute("device_add", &device)?;
        let wait = "n=0; until [ -e /sys/class/net/eth0 ]; do sleep 0.1; n=$((n+1)); [ $n -lt 100 ] || { ip link; exit 1; }; done";
        self.guest(0)?.must(&format!("{wait}; i=eth0{ADDRESSES}"), SHORT)?;
        self.reattach()
    }
}
