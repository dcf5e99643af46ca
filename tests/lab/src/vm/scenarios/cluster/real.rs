//! Real guests of the two nodes: Linux in a machine of each VM, with our driver and an unmodified
//! rping (see `vm::nested`).
//!
//! A guest's one netdev has the address of its NIC, and the nodes route between them, as a pod
//! network would: that is what rdma_cm asks for the way. The data takes the other one, from RNIC to
//! RNIC, and connections go through the daemons' channel.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::World;
use super::node::STEP;
use super::plane::{AMBER, WAIT, pause};
use super::traffic::first;
use crate::vm::guest::{Guest, Job};
use crate::vm::nested::{self, BOOT, Inner};
use crate::vm::peers;
use crate::vm::programs::PROGRAMS;
use crate::vm::scenarios::rnic::nested::{End, play};

const NAMES: [&str; 2] = ["ra", "rb"];
/// Exchanges of one rping.
const PINGS: u32 = 20;
/// A program in an emulated machine of an emulated machine.
const LONG: Duration = Duration::from_secs(900);

/// The way from a node's guest to the other's: `@HERE@` by the tap, `@THERE@` by the other node.
const WAY: &str = "set -e
ip route add @HERE@/32 dev tap@NUMBER@
ip route add @THERE@/32 via @NODE@ dev eth0
";

/// In the guest, before its device is there: the address of its NIC instead of the lab's.
const ADDRESS: &str = "set -e
ip addr flush dev eth0
ip addr add @HERE@/16 dev eth0
";

const LISTENS: &str = "n=0
until rdma resource show cm_id | grep -q LISTEN; do sleep 0.5; n=$((n+1)); [ $n -lt 200 ] || \
    exit 1; done
";

fn number(n: usize) -> Result<u8> {
    Ok(u8::try_from(n)? + 11)
}

impl World {
    /// The address of the real guest of node `n`: the second of the node's block.
    fn of_guest(&self, n: usize) -> Result<String> {
        let host = self.hosts.get(n).context("no such host")?;
        let first: Ipv4Addr = first(&self.plane.block(host, AMBER)?)?.parse()?;
        Ok(Ipv4Addr::from(u32::from(first) + 1).to_string())
    }

    /// One guest of each node; they boot side by side.
    pub(super) fn real_guests(&mut self) -> Result<()> {
        let addresses = [self.of_guest(0)?, self.of_guest(1)?];
        for n in [0, 1] {
            let (here, there) = (&addresses[n], &addresses[n ^ 1]);
            let node = self.hosts.get(n ^ 1).context("no such host")?.address.clone();
            let (host, guest) = self.host(n)?;
            nested::prepare(guest)?;
            let inner = Inner { name: NAMES[n], number: number(n)?, cli: "vhost-rdma" };
            let of_nic =
                format!("--network {AMBER} --backing rnic:rxe0@{} --address {here}", host.address);
            let started = inner.start(guest, &of_nic)?;
            let way = WAY.replace("@HERE@", here).replace("@THERE@", there);
            let way = way.replace("@NODE@", &node).replace("@NUMBER@", &number(n)?.to_string());
            guest.must(&way, STEP)?;
            for file in std::fs::read_dir(guest.share().join("products"))? {
                let file = file?.path();
                // The node's own programs are no guest's.
                if !file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vh")) {
                    started.deliver(&[file])?;
                }
            }
            self.guests.push(started);
        }
        for guest in &mut self.guests {
            guest.wait_ready_for(BOOT)?;
        }
        for (guest, here) in self.guests.iter_mut().zip(&addresses) {
            guest.must(&ADDRESS.replace("@HERE@", here), LONG)?;
            peers::load_ours(guest)?;
            let (device, gid) = peers::find_address(guest, here)?;
            eprintln!("    {}: {device} has {here} at index {gid}", guest.name);
        }
        let there = &addresses[1];
        let guest = self.guests.first_mut().context("no guest")?;
        guest.must(&format!("ping -q -c 2 -W 20 {there}"), LONG).map(drop)
    }

    /// Both guests, each with its address; the first one serves.
    fn ends(&mut self, server: usize) -> Result<(End<'_>, End<'_>)> {
        let [at_server, at_client] = [self.of_guest(server)?, self.of_guest(server ^ 1)?];
        let [a, b] = self.guests.as_mut_slice() else { bail!("there are no two guests") };
        let (server, client) = if server == 0 { (a, b) } else { (b, a) };
        let server = End::find(server, &at_server, &at_server)?;
        Ok((server, End::find(client, &at_client, &at_client)?))
    }

    fn rping(&mut self, server: usize) -> Result<()> {
        let program = PROGRAMS.iter().find(|p| p.name == "rping -v").context("no rping")?;
        let (mut at, mut from) = self.ends(server)?;
        let name = format!("rping, {} serves", at.guest.name);
        let (row, said) = play(&name, &mut at, &mut from, (program, PINGS))?;
        ensure!(row.ok, "{said}");
        Ok(())
    }

    pub(super) fn rping_a(&mut self) -> Result<()> {
        self.rping(0)
    }

    pub(super) fn rping_b(&mut self) -> Result<()> {
        self.rping(1)
    }

    /// A connection lives through a change of the root, and one that is made afterwards works.
    pub(super) fn rotated_meanwhile(&mut self) -> Result<()> {
        let (_, before) = self.plane.roots()?;
        let address = self.of_guest(1)?;
        let serve = self.begin(1, "exec rping -s -a 0.0.0.0")?;
        self.real(1)?.must(LISTENS, LONG)?;
        // Without an end; each line is to be seen when it is written.
        let call = self.begin(0, &format!("exec stdbuf -oL rping -c -a {address} -v"))?;
        self.wait_for_pings(call, 0)?;
        self.plane.rotate()?;
        let begun = Instant::now();
        loop {
            pause();
            let (all, root) = self.plane.roots()?;
            if all == 1 && root != before && self.all_of(&root)? {
                break;
            }
            ensure!(begun.elapsed() < 2 * WAIT, "no other root: {}", self.objects());
        }
        let seconds = begun.elapsed().as_secs_f64();
        let so_far = pings(&self.real(0)?.output(call));
        eprintln!("    another root after {seconds:.1} s and {so_far} exchanges");
        self.wait_for_pings(call, so_far)?;
        for (n, job) in [(0, call), (1, serve)] {
            self.real(n)?.kill(job)?;
        }
        self.rping(0)
    }

    fn real(&mut self, n: usize) -> Result<&mut Guest> {
        self.guests.get_mut(n).context("no such guest")
    }

    fn begin(&mut self, n: usize, command: &str) -> Result<Job> {
        self.real(n)?.spawn(&format!("ulimit -l unlimited\n{command}\n"))
    }

    /// Waits until a connection has had more exchanges than these.
    fn wait_for_pings(&mut self, job: Job, than: usize) -> Result<()> {
        let begun = Instant::now();
        let guest = self.real(0)?;
        while pings(&guest.output(job)) <= than {
            let ended = guest.finished(job)?;
            let goes_on = ended.is_none() && begun.elapsed() < LONG;
            ensure!(goes_on, "{than} exchanges ({ended:?}): {}", guest.output(job));
            pause();
        }
        Ok(())
    }
}

/// Exchanges that a client of rping has told.
fn pings(text: &str) -> usize {
    text.lines().filter(|line| line.starts_with("ping data: ")).count()
}
