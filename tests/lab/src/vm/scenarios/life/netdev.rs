//! The network interface that the RDMA device belongs to: down, renamed, with another address,
//! gone.
//!
//! What leaves its addresses must not harm programs. A new MAC address makes the kernel set up its
//! GIDs anew, in other entries of the table: connections by the old entries end, as they do with
//! other RNICs. What takes the interface away takes the RDMA device too.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Life, NICS, SHORT};
use crate::exec;
use crate::vm::guest::{self, Job};
use crate::vm::peers::Patience;

/// The addresses that a guest's init gave its interface; they went with it or with its link. `$i`
/// is the interface.
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
until grep -qi '{event}' /tmp/events; do sleep 0.1; n=$((n+1)); [ $n -lt 200 ] || { \
    cat /tmp/events; ibv_devinfo; exit 1; }; done
ibv_devinfo -d {dev} | grep {state}
";

/// Guest a's.
const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1));
/// For how long nothing may move.
const STILL: Duration = Duration::from_millis(300);

const NEW_MAC: &str = "52:54:00:00:99:01";

impl Life {
    fn watch_events(&mut self) -> Result<Job> {
        let dev = self.devices.name(0).to_owned();
        let guest = self.guest(0)?;
        let job =
            guest.spawn(&format!("exec stdbuf -oL ibv_asyncwatch -d {dev} > /tmp/events 2>&1"))?;
        guest.must(
            "n=0; until grep -q async.event /tmp/events; do sleep 0.1; n=$((n+1)); [ $n -lt 100 ] \
             || exit 1; done",
            SHORT,
        )?;
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
        self.port_down_and_up(
            |life| life.guest(0)?.must("ip link set eth0 down", SHORT).map(|_| ()),
            |life| life.guest(0)?.must(&format!("i=eth0{ADDRESSES}"), SHORT).map(|_| ()),
        )
    }

    pub(super) fn cable(&mut self) -> Result<()> {
        self.port_down_and_up(|life| life.plug_cable(false), |life| life.plug_cable(true))
    }

    fn plug_cable(&mut self, up: bool) -> Result<()> {
        let link = json!({ "name": "net", "up": up });
        self.guest(0)?.monitor()?.execute("set_link", &link).map(|_| ())
    }

    /// With the port down the NIC holds no address, so that nothing moves under one; with the port
    /// up it holds those of the guest's table again, and a connection that waited goes on.
    fn port_down_and_up(
        &mut self,
        down: fn(&mut Self) -> Result<()>,
        up: fn(&mut Self) -> Result<()>,
    ) -> Result<()> {
        let (client, server) = self.load_with(Patience::Long)?;
        let watch = self.watch_events()?;
        self.must_agree_on_addresses()?;
        let start = Instant::now();
        down(self)?;
        self.must_see("port.err", "PORT_DOWN")?;
        self.must_stand_still()?;
        // The kernel keeps the entries of its table: they are the interface's.
        let kept = self.guest_addresses()?;
        ensure!(kept.contains(&ADDRESS), "the guest forgot its address: {kept:?}");
        up(self)?;
        self.must_see("port.active", "PORT_ACTIVE")?;
        // Traffic that is cut off for longer than it has patience for ends.
        eprintln!("    the port was down for {:.1} s", start.elapsed().as_secs_f64());
        self.guest(0)?.kill(watch)?;
        self.must_go_on(client)?;
        self.must_agree_on_addresses()?;
        self.guest(0)?.kill(client)?;
        self.end(1, server)?;
        self.reattach()
    }

    /// The NIC of guest a has no address and moves nothing.
    fn must_stand_still(&self) -> Result<()> {
        let daemon = &self.fixture.daemon;
        exec::wait_for("the NIC's addresses to go", SHORT, || {
            Ok(daemon.nic(NICS[0])?.gids.is_empty().then_some(()))
        })?;
        // What was on its way is done by now, at most a burst.
        std::thread::sleep(STILL);
        let before = daemon.counters(NICS[0])?;
        std::thread::sleep(STILL);
        let moved = daemon.counters(NICS[0])?.since(&before).bytes();
        ensure!(moved == 0, "a port that is down moved {moved} bytes");
        Ok(())
    }

    /// The entries of guest a's GID table.
    fn guest_addresses(&mut self) -> Result<BTreeSet<IpAddr>> {
        let script =
            format!("cat /sys/class/infiniband/{}/ports/1/gids/* | sort -u", self.devices.name(0));
        let text = self.guest(0)?.must(&script, SHORT)?;
        let gids = text.lines().filter_map(|line| line.trim().parse::<Ipv6Addr>().ok());
        Ok(gids.filter(|gid| !gid.is_unspecified()).map(|gid| gid.to_canonical()).collect())
    }

    /// The guest's table and the device's become the same, and are not empty.
    fn must_agree_on_addresses(&mut self) -> Result<()> {
        let begin = Instant::now();
        loop {
            let guest = self.guest_addresses()?;
            let nic = self.fixture.daemon.nic(NICS[0])?.gids.into_iter().collect();
            if guest == nic && guest.contains(&ADDRESS) {
                return Ok(());
            }
            ensure!(begin.elapsed() < SHORT, "the guest has {guest:?}, its NIC {nic:?}");
            exec::check_interrupt()?;
        }
    }

    pub(super) fn rename(&mut self) -> Result<()> {
        // It is down meanwhile.
        let (client, server) = self.load_with(Patience::Long)?;
        let rename = |from: &str, to: &str| {
            format!("ip link set {from} down && ip link set {from} name {to}; i={to}{ADDRESSES}")
        };
        self.guest(0)?.must(&rename("eth0", "lan7"), SHORT)?;
        self.must_go_on(client)?;
        self.reattach()?;
        let dev = self.devices.name(0).to_owned();
        self.guest(0)?.must(&format!("rdma link show {dev}/1 | grep 'netdev lan7'"), SHORT)?;
        self.both_work()?;
        self.guest(0)?.must(&rename("lan7", "eth0"), SHORT)?;
        self.must_go_on(client)?;
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
            "n=0; while [ -n \"$(ls /sys/class/infiniband)\" ]; do sleep 0.1; n=$((n+1)); \
             [ $n -lt 100 ] || exit 1; done",
            SHORT,
        )?;
        self.wait_empty(NICS[0], true)?;
        let device = json!({
            "driver": "virtio-net-pci", "id": "net", "bus": "rp1", "netdev": "vrnet0",
            "mac": guest::mac(1)
        });
        monitor.execute("device_add", &device)?;
        let wait = "n=0; until [ -e /sys/class/net/eth0 ]; do sleep 0.1; n=$((n+1)); \
                    [ $n -lt 100 ] || { ip link; exit 1; }; done";
        self.guest(0)?.must(&format!("{wait}; i=eth0{ADDRESSES}"), SHORT)?;
        self.reattach()
    }
}
