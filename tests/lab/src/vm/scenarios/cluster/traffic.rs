//! The steps: what the two nodes must be able to do, and what not.

use std::fs;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::World;
use super::node::{Host, NicPlan, STEP, busy, peers};
use super::plane::{AMBER, BERYL, WAIT, pause};
use crate::exec::wait_for;
use crate::vm::peers as rxe;

/// Where the virtual guests of each network take requests.
const AMBER_PORT: u16 = 7471;
const BERYL_PORT: u16 = 7472;
/// Bytes of each request.
const BYTES: u32 = 20_000;
/// A request in an emulated machine, at its worst.
const REQUEST: Duration = Duration::from_secs(120);
/// Rounds of requests both ways while a root is replaced, at least.
const ROUNDS: u32 = 3;
/// Seconds of a processor in ten that a program may take while there is nothing to do, unoptimised
/// and emulated. The agent looks at each device once a second; what never sleeps takes ten.
const IDLE: f64 = 3.0;
/// Asks a virtual guest for something, over TCP: `@AT@` its port, `@WHAT@` the request.
const ASK: &str =
    "printf '%s\\n' '@WHAT@' | timeout @PATIENCE@ busybox nc 127.0.0.1 @AT@ | head -n 1";

/// The first address of a block that NICs get: those that end in 0 or 255 are nobody's.
pub(super) fn first(block: &str) -> Result<String> {
    let (base, _) = block.split_once('/').context("a block is a CIDR")?;
    let base: Ipv4Addr = base.parse().with_context(|| block.to_owned())?;
    let plus = u32::from(base.octets()[3] == 0);
    Ok(Ipv4Addr::from(u32::from(base) + plus).to_string())
}

impl World {
    /// A node with nothing to do leaves its processors alone.
    pub(super) fn idle(&mut self) -> Result<()> {
        for n in [0, 1] {
            let (host, guest) = self.host(n)?;
            let all = busy(guest)?;
            eprintln!("    {}: {all:?}", host.node);
            ensure!(!all.is_empty(), "no program of ours runs");
            for (name, seconds) in all {
                ensure!(seconds < IDLE, "{name} took {seconds} s of ten, with nothing to do");
            }
        }
        Ok(())
    }

    /// From machines to nodes that know and believe each other.
    pub(super) fn introduced(&mut self) -> Result<()> {
        for n in [0, 1] {
            let share = self.lab.guests.get(n).context("no such VM")?.share().to_owned();
            fs::copy(self.plane.node.lab().join("pki/ca.crt"), share.join("ca.crt"))?;
            let host = self.hosts.get(n).context("no such host")?;
            fs::write(share.join("agent.kubeconfig"), self.plane.join(host, "/host/ca.crt")?)?;
            Host::cards(self.host(n)?.1)?;
        }
        let (a, b) = self.lab.pair()?;
        rxe::attach_rxe(a, b)?;
        for n in [0, 1] {
            let (host, guest) = self.host(n)?;
            Host::start_daemon(guest)?;
            host.start_agent(guest)?;
        }
        let (_, root) = self.plane.roots()?;
        wait_for("both nodes to be certified and to follow the lists", WAIT, || {
            pause();
            Ok(self.all_of(&root)?.then_some(()))
        })
        .with_context(|| self.objects())?;
        for network in [AMBER, BERYL] {
            self.knows(0, network)?;
            self.knows(1, network)?;
        }
        Ok(())
    }

    pub(super) fn objects(&self) -> String {
        let all = self.hosts.iter().map(|host| match self.plane.object(host) {
            Ok(object) => object.pointer("/status").map(Value::to_string).unwrap_or_default(),
            Err(error) => format!("{error:#}"),
        });
        all.collect::<Vec<_>>().join("\n")
    }

    /// Every node has a certificate of this root and follows the lists.
    pub(super) fn all_of(&self, root: &str) -> Result<bool> {
        for host in &self.hosts {
            if self.plane.certified(host)?.as_deref() != Some(root) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until the daemon of node `n` knows the other's block of a network, and no other.
    fn knows(&mut self, n: usize, network: &str) -> Result<()> {
        let other = self.hosts.get(n ^ 1).context("no such host")?;
        let block = self.plane.block(other, network)?;
        let wanted = [block, other.address.clone(), other.endpoint()];
        self.told(n, network, &wanted)
    }

    /// Waits until the daemon of node `n` has exactly this entry.
    fn told(&mut self, n: usize, network: &str, wanted: &[String; 3]) -> Result<()> {
        let guest = self.lab.guests.get_mut(n).context("no such VM")?;
        let mut last = Vec::new();
        let found = wait_for("a daemon to know where the other's addresses are", WAIT, || {
            pause();
            last = peers(guest, network)?;
            Ok((last[..] == [wanted.clone()]).then_some(()))
        });
        found.with_context(|| format!("{} knows {last:?}, not {wanted:?}", guest.name))
    }

    /// The NIC of a node in a network, with its virtual guest.
    fn add(&mut self, n: usize, network: &str, port: u16) -> Result<()> {
        let host = self.hosts.get(n).context("no such host")?;
        let address = first(&self.plane.block(host, network)?)?;
        let (host, guest) = self.host(n)?;
        host.add_guest(guest, &NicPlan { network, address: &address, port })
    }

    /// One request of the virtual guest at `from` of node `n`: its answer.
    fn ask(&mut self, n: usize, from: u16, what: &Value) -> Result<Value> {
        let guest = self.lab.guests.get_mut(n).context("no such VM")?;
        let script = ASK
            .replace("@WHAT@", &what.to_string())
            .replace("@PATIENCE@", &REQUEST.as_secs().to_string())
            .replace("@AT@", &from.to_string());
        let text = guest.must(&script, REQUEST + STEP)?;
        serde_json::from_str(&text).with_context(|| format!("the answer to {what}: {text:?}"))
    }

    /// Data and a datagram of QP 1 between the two guests, asked for by that of node `n`; how often
    /// the datagram was sent.
    fn request(&mut self, n: usize) -> Result<u64> {
        let peer = self.hosts.get(n ^ 1).context("no such host")?.guest(AMBER_PORT);
        let what = json!({"do": "transfer", "peer": peer, "bytes": BYTES});
        let said = self.ask(n, AMBER_PORT, &what)?;
        let number = |key: &str| said.get(key).and_then(Value::as_u64);
        ensure!(number("bytes") == Some(4 * u64::from(BYTES)), "from {n}: {said}");
        number("datagrams").filter(|times| *times > 0).with_context(|| format!("no cm: {said}"))
    }

    /// Requests both ways.
    pub(super) fn both_ways(&mut self) -> Result<()> {
        for n in [0, 1] {
            self.add(n, AMBER, AMBER_PORT)?;
        }
        for n in [0, 1] {
            self.request(n)?;
        }
        Ok(())
    }

    /// A guest of another VNI has the same devices under it and gets nowhere; its own network
    /// works.
    pub(super) fn another_network(&mut self) -> Result<()> {
        for n in [0, 1] {
            self.add(n, BERYL, BERYL_PORT)?;
        }
        let transfer = |host: &Host, port: u16| {
            json!({
                "do": "transfer", "peer": host.guest(port), "bytes": BYTES
            })
        };
        let own = transfer(&self.hosts[1], BERYL_PORT);
        let said = self.ask(0, BERYL_PORT, &own)?;
        ensure!(said.get("bytes").is_some(), "its own network does not work: {said}");
        for (n, from, to) in [(0, BERYL_PORT, AMBER_PORT), (1, AMBER_PORT, BERYL_PORT)] {
            let across = transfer(&self.hosts[n ^ 1], to);
            let said = self.ask(n, from, &across)?;
            let why = said.get("error").and_then(Value::as_str).unwrap_or_default();
            ensure!(why.contains("INIT to RTR"), "from {from} to {to}: {said}");
            eprintln!("    from {from} to {to}: {why}");
        }
        self.both_ways_again()
    }

    fn both_ways_again(&mut self) -> Result<()> {
        for n in [0, 1] {
            self.request(n)?;
        }
        Ok(())
    }

    /// Another root takes the place of the first, while requests go both ways.
    pub(super) fn rotated(&mut self) -> Result<()> {
        let (_, before) = self.plane.roots()?;
        self.plane.rotate()?;
        let begun = Instant::now();
        let (mut rounds, mut repeated, mut over) = (0, 0, None);
        while over.is_none() || rounds < ROUNDS {
            for n in [0, 1] {
                let times = self.request(n).with_context(|| {
                    format!("{:.1} s after the rotation began", begun.elapsed().as_secs_f64())
                })?;
                repeated += times - 1;
            }
            rounds += 1;
            let (all, root) = self.plane.roots()?;
            if over.is_none() && all == 1 && root != before && self.all_of(&root)? {
                over = Some(begun.elapsed());
                rounds = 0;
            }
            if begun.elapsed() > 2 * WAIT {
                bail!("no other root after {rounds} rounds of requests: {}", self.objects());
            }
        }
        let seconds = over.unwrap_or_default().as_secs_f64();
        eprintln!("    another root after {seconds:.1} s; datagrams sent again: {repeated}");
        Ok(())
    }

    /// Node b's machine is reset. There is no API server and no controller: what it needs is on its
    /// disk.
    pub(super) fn restarted(&mut self) -> Result<()> {
        let other = self.hosts.first().context("no host")?;
        let block = self.plane.block(other, AMBER)?;
        let wanted = [block, other.address.clone(), other.endpoint()];
        let own = first(&self.plane.block(&self.hosts[1], AMBER)?)?;
        self.plane.away()?;
        let guest = self.lab.guests.get_mut(1).context("no such VM")?;
        guest.must("sync", STEP)?;
        guest.reset()?;
        Host::cards(guest)?;
        rxe::attach_rxe_to(guest)?;
        guest.must("test ! -e /run/vhost-rdma && rm -f /host/amber.log", STEP)?;
        Host::start_daemon(guest)?;
        let (host, guest) = self.host(1)?;
        host.start_agent(guest)?;
        self.told(1, AMBER, &wanted)?;
        let (host, guest) = self.host(1)?;
        host.add_guest(guest, &NicPlan { network: AMBER, address: &own, port: AMBER_PORT })?;
        self.both_ways_again()
    }
}
