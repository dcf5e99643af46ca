//! A real guest on the RNIC: QEMU inside the VM that stands for the host, our driver and provider
//! in it, and stock programs that talk to plain rxe in the other VM, each as server and as client.
//!
//! The guest's netdev has two addresses. 10.9.0.x is its own, which programs meet at over TCP.
//! 10.0.0.x is the one it shares with the host's port (`flat`, docs/RNIC.md §2): a GID and nothing
//! else, since packets for it end at the host's port, where the RNIC takes those that are its own.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::{Args, SET_UP};
use crate::cache::Cache;
use crate::rows::Row;
use crate::vm::guest::{Guest, Output};
use crate::vm::nested::{self, Inner};
use crate::vm::peers;
use crate::vm::programs::{PROGRAMS, Program};

/// The addresses of the inner guest (flat) and of the peer.
const GUEST: u8 = 11;
const PEER: &str = "10.0.0.200";
/// Last octet of 10.9.0.x.
const NUMBER: u8 = 11;

const CLIENT: Duration = Duration::from_secs(900);
/// Small commands in the inner guest.
const STEP: Duration = Duration::from_secs(300);

/// One row each way.
const CHOSEN: &[(&str, u32)] = &[
    ("ibv_rc_pingpong -c", 100),
    ("ib_write_bw", 100),
    ("ib_read_bw", 50),
    ("ib_send_bw", 50),
    ("ib_send_lat", 100),
    ("ib_atomic_bw", 100),
    ("vrdma-check write", 1),
    ("vrdma-check read", 1),
    ("vrdma-check send", 1),
    ("vrdma-check atomic", 1),
];

/// The same by rdma_cm: they meet at the addresses of the RNIC, the guest by its kernel's
/// connection manager.
const BY_RDMA_CM: &[(&str, u32)] = &[("rping -v", 20), ("ucmatose", 10)];

const SERVE: &str = "ulimit -l unlimited
cp /host/products/vhost-rdma /tmp/
exec /tmp/vhost-rdma serve --runtime-dir /run/v --ephemeral @OPTIONS@ > /host/daemon.log 2>&1
";
/// The ports of rping and ucmatose.
const CM_PORTS: &str = "--cm-port 7174 --cm-port 7471";
/// How the daemon in the host VM is told something.
pub(in crate::vm::scenarios) const CLI: &str = "/tmp/vhost-rdma --socket /run/v/admin.sock";

/// Starts the daemon in the host VM, with these options, and adds network `net`.
pub(in crate::vm::scenarios) fn serve(host: &mut Guest, options: &str) -> Result<()> {
    host.spawn(&SERVE.replace("@OPTIONS@", options))?;
    host.must(
        "n=0; until [ -S /run/v/admin.sock ]; do sleep 0.2; n=$((n+1)); [ $n -lt 200 ] || { \
         cat /host/daemon.log; exit 1; }; done",
        SET_UP,
    )?;
    cli(host, "network add net").map(|_| ())
}

/// One command of the daemon's command line, in the host VM.
pub(in crate::vm::scenarios) fn cli(host: &mut Guest, command: &str) -> Result<String> {
    host.must(&format!("{CLI} {command}"), SET_UP)
}

/// One end of a program's conversation.
pub(in crate::vm::scenarios) struct End<'a> {
    pub(in crate::vm::scenarios) guest: &'a mut Guest,
    /// Where programs meet.
    ip: String,
    device: (String, String),
}

impl<'a> End<'a> {
    /// The end whose RDMA address is `address`.
    pub(in crate::vm::scenarios) fn find(
        guest: &'a mut Guest,
        ip: &str,
        address: &str,
    ) -> Result<Self> {
        let device = peers::find_address(guest, address)?;
        Ok(Self { guest, ip: ip.to_owned(), device })
    }

    fn command(&self, line: &str, n: u32, peer: &str) -> String {
        // An acknowledgment takes longer here than the 67 ms after which perftest would have the
        // request repeated.
        let patient = if line.starts_with("ib_") { " -u 20" } else { "" };
        let line = line
            .replace("{dev}", &self.device.0)
            .replace("{gid}", &self.device.1)
            .replace("{n}", &n.to_string())
            .replace("{peer}", peer);
        format!("ulimit -l unlimited\nexport PATH=$PATH:/host/products\nexec {line}{patient}\n")
    }
}

/// Runs a program between two ends; the row, and what both wrote.
pub(in crate::vm::scenarios) fn play(
    name: &str,
    server: &mut End<'_>,
    client: &mut End<'_>,
    what: (&Program, u32),
) -> Result<(Row, String)> {
    let (program, n) = what;
    let job = server.guest.spawn(&server.command(program.server, n, ""))?;
    let test = match program.port {
        0 => "rdma resource show cm_id | grep -q LISTEN".to_owned(),
        port => format!("grep -qi ':{port:04X} [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6"),
    };
    let listens =
        format!("n=0; until {test}; do sleep 0.2; n=$((n+1)); [ $n -lt 300 ] || exit 1; done");
    server.guest.run(&listens, STEP)?;
    let start = Instant::now();
    let client_out = client.guest.run(&client.command(program.client, n, &server.ip), CLIENT)?;
    let seconds = start.elapsed().as_secs_f64();
    // A server whose client is gone notices by itself; to have it killed in there takes longer
    // still.
    let server_out = server.guest.wait(job, STEP)?;
    let said = format!("{}\n--- the server\n{}", client_out.text.trim_end(), server_out.text);
    let ok = client_out.ok() && server_out.ok() && client_out.text.contains(program.expect);
    let value = if ok { program.figure.read(&client_out.text, seconds).ok() } else { None };
    report(name, ok, (&client_out, &server_out), &said);
    let row = Row { value, unit: program.unit.into(), ..Row::verdict(name, ok && value.is_some()) };
    Ok((row, said))
}

fn report(name: &str, ok: bool, ends: (&Output, &Output), said: &str) {
    let verdict = if ok { "ok" } else { "FAILED" };
    eprintln!("    {name}: {verdict} (client {:?}, server {:?})", ends.0.status, ends.1.status);
    said.lines().for_each(|line| eprintln!("    | {line}"));
}

impl Args {
    /// The nested part: `host` is a [`Nic::Host`](crate::vm::Nic::Host) with rxe0.
    pub(super) fn nested(
        &self,
        cache: &Cache,
        lab: &mut crate::vm::Lab,
        table: &mut Vec<Row>,
    ) -> Result<()> {
        let products = crate::products::for_guest(cache, self.debian)?;
        lab.deliver(&products)?;
        let (host, peer) = lab.pair()?;
        serve(host, CM_PORTS)?;
        cli(host, &format!("peer add {PEER} --network net"))?;
        nested::prepare(host)?;
        let inner = Inner { name: "n", number: NUMBER, cli: CLI };
        let mut inner = inner.start(host, "--network net --backing rnic:rxe0")?;
        inner.deliver(&products)?;
        inner.wait_ready_for(nested::BOOT)?;
        self.rows(&mut inner, peer, table)?;
        let clean = super::fixture::kernel_is_clean(&mut inner);
        table.push(Row::verdict("kernel of the inner guest", clean));
        Ok(())
    }

    fn rows(&self, inner: &mut Guest, peer: &mut Guest, table: &mut Vec<Row>) -> Result<()> {
        peers::load_ours(inner)?;
        inner.must(&format!("ip addr add 10.0.0.{GUEST}/24 dev eth0"), STEP)?;
        let mut ours = End::find(inner, &format!("10.9.0.{NUMBER}"), &format!("10.0.0.{GUEST}"))?;
        let mut theirs = End::find(peer, "10.9.0.2", PEER)?;
        ours.guest.must("ping -q -c 2 -W 20 10.9.0.2", STEP)?;
        if self.wanted("nested: ibv_devinfo") {
            let out = ours.guest.run("ibv_devinfo -v", CLIENT)?;
            eprintln!("{}", out.text);
            table.push(Row::verdict(
                "nested: ibv_devinfo",
                out.ok() && out.text.contains("PORT_ACTIVE"),
            ));
        }
        let meet_at = [&ours, &theirs].map(|end| end.ip.clone());
        let chosen = CHOSEN.iter().map(|chosen| (chosen, meet_at.clone()));
        let of_rnic = [format!("10.0.0.{GUEST}"), PEER.to_owned()];
        let by_cm = BY_RDMA_CM.iter().map(|chosen| (chosen, of_rnic.clone()));
        for ((name, n), ips) in chosen.chain(by_cm) {
            [ours.ip, theirs.ip] = ips;
            let program = PROGRAMS.iter().find(|p| p.name == *name).context("no such program")?;
            let there = format!("nested: {name}, rxe serves");
            if self.wanted(&there) {
                table.push(play(&there, &mut theirs, &mut ours, (program, *n))?.0);
            }
            let here = format!("nested: {name}, the guest serves");
            if self.wanted(&here) {
                table.push(play(&here, &mut ours, &mut theirs, (program, *n))?.0);
            }
        }
        Ok(())
    }
}
