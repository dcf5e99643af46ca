//! Data between virtual guests on the RNIC and a third-party host, every byte looked at:
//! `vrdma-check` on plain rxe, with flat and with mapped addresses, each as server and as client;
//! and two mapped guests, one on each host.
//!
//! A third-party host knows nothing of mapped addresses: it is told the host's. The guest in turn
//! calls it by whatever name the peer table has.

use std::time::Duration;

use anyhow::Result;

use super::{Args, OURS, SET_UP};
use crate::rows::Row;
use crate::vm::guest::{Guest, Output};

const TALK: Duration = Duration::from_secs(300);
/// `vrdma-check`'s, in the form of /proc/net/tcp.
pub(in crate::vm::scenarios) const PORT: &str = "48A8";
/// The mapped guests are 10.1.0.1 behind 10.0.0.39 and 10.1.0.2 behind 10.0.0.200, the peer's only
/// address.
const MAPPED: &str = "rnic:rxe0@10.0.0.39";
const MAPPED_THERE: &str = "rnic:rxe0@10.0.0.200";

/// `vrdma-check` of the peer.
const THEIRS: &str = "ulimit -l unlimited
gid=$(grep -ls ':ffff:0a00:00c8$' /sys/class/infiniband/rxe0/ports/1/gids/* | head -n 1)
exec /host/products/vrdma-check -d rxe0 -g ${gid##*/} ";

/// One side of a conversation: where, and what it runs.
pub(in crate::vm::scenarios) type Side<'a> = (&'a mut Guest, &'a str);

/// Starts a server, waits until it listens on a port, and lets a client talk to it: what the client
/// and the server said.
pub(in crate::vm::scenarios) fn meet(
    (server, serve): Side<'_>,
    (client, call): Side<'_>,
    port: &str,
    patience: Duration,
) -> Result<(Output, Output)> {
    let job = server.spawn(serve)?;
    let listens = format!(
        "n=0; until grep -qi ':{port} [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6; do sleep 0.2; \
         n=$((n+1)); [ $n -lt 250 ] || exit 1; done"
    );
    server.run(&listens, SET_UP)?;
    let client = client.run(call, patience)?;
    let patience = if client.ok() { patience } else { SET_UP };
    let server = server.wait(job, patience)?;
    Ok((client, server))
}

fn judge(name: &str, (client, server): &(Output, Output), expect: &str) -> Row {
    let ok = client.ok() && server.ok() && client.text.contains(expect);
    eprintln!("{name}: client {:?}, server {:?}", client.status, server.status);
    eprintln!("{}\n{}", client.text.trim_end(), server.text.trim_end());
    Row::verdict(name, ok)
}

/// A virtual guest's program.
pub(in crate::vm::scenarios) fn ours(backing: &str, options: &str) -> String {
    format!("{}exec /host/products/check {options}\n", OURS.replace("@BACKING@", backing))
}

/// `vrdma-check` of the peer with these options.
pub(in crate::vm::scenarios) fn theirs(options: &str) -> String {
    format!("{THEIRS}{options}\n")
}

impl Args {
    /// All rows of verified data.
    pub(super) fn verified(
        &self,
        host: &mut Guest,
        peer: &mut Guest,
        table: &mut Vec<Row>,
    ) -> Result<()> {
        const OPS: &str = "write read send";
        for (what, backing, address, call_back) in [
            ("flat", "rnic:rxe0", "--address 10.0.0.1 --peer 10.0.0.200", "10.0.0.1"),
            (
                "mapped",
                MAPPED,
                "--address 10.1.0.1 --peer 10.1.0.200=10.0.0.200 \
                 --call 10.1.0.200 --tell 10.0.0.39",
                "10.0.0.39",
            ),
        ] {
            let name = format!("verified: {what}, rxe serves");
            if self.wanted(&name) {
                let client = ours(backing, &format!("{address} --connect 10.0.0.200:18600 {OPS}"));
                let said = meet((&mut *peer, &theirs("")), (&mut *host, &client), PORT, TALK)?;
                table.push(judge(&name, &said, "Send: 84 messages"));
            }
            let name = format!("verified: {what}, the guest serves");
            if self.wanted(&name) {
                let client = theirs(&format!("-c {call_back} -s 65537 {OPS}"));
                let said =
                    meet((&mut *host, &ours(backing, address)), (&mut *peer, &client), PORT, TALK)?;
                table.push(judge(&name, &said, "\"op\":\"send\",\"ok\":true"));
            }
        }
        let name = "verified: mapped guests on two hosts";
        if self.wanted(name) {
            let client = format!(
                "--address 10.1.0.1 --peer 10.1.0.2=10.0.0.200 --connect 10.0.0.200:18600 {OPS}"
            );
            let server = "--address 10.1.0.2 --peer 10.1.0.1=10.0.0.39";
            let said = meet(
                (&mut *peer, &ours(MAPPED_THERE, server)),
                (&mut *host, &ours(MAPPED, &client)),
                PORT,
                TALK,
            )?;
            table.push(judge(name, &said, "Send: 84 messages"));
        }
        Ok(())
    }
}
