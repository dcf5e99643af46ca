//! `ibv_rc_pingpong` on plain rxe plays with a virtual guest, each as server and as client.

use std::time::Duration;

use anyhow::Result;

use super::{Args, OURS, SET_UP};
use crate::rows::Row;
use crate::vm::guest::{Guest, Output};

const PINGPONG: Duration = Duration::from_secs(300);
/// Both ends poll, so on a busy machine each waits for the other to be run: tens of milliseconds
/// for an iteration.
const GAMES: u32 = 200;

impl Args {
    /// `ibv_rc_pingpong` on plain rxe with a virtual guest, both ways.
    pub(super) fn pingpong(
        &self,
        host: &mut Guest,
        peer: &mut Guest,
        table: &mut Vec<Row>,
    ) -> Result<()> {
        let ours = format!(
            "{}exec /host/products/pingpong --address 10.0.0.1 --peer 10.0.0.200 \
             --iterations {GAMES} ",
            OURS.replace("@BACKING@", "rnic:rxe0")
        );
        let theirs = format!(
            "ulimit -l unlimited
gid=$(for f in /sys/class/infiniband/rxe0/ports/1/gids/*; do grep -q 'ffff:0a00:00c8' $f && \
    basename $f && break; done)
exec ibv_rc_pingpong -d rxe0 -g $gid -n {GAMES} -c "
        );
        if self.wanted("pingpong: rxe serves") {
            let server = peer.spawn(&theirs)?;
            peer.run(
                "n=0; until grep -qi ':4853 [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6; do \
                 sleep 0.1; n=$((n+1)); [ $n -lt 100 ] || exit 1; done",
                SET_UP,
            )?;
            let client = host.run(&format!("{ours} --connect 10.0.0.200:18515"), PINGPONG)?;
            let served = peer.wait(server, PINGPONG)?;
            table.push(both("pingpong: rxe serves", &client, &served));
        }
        if self.wanted("pingpong: the guest serves") {
            let server = host.spawn(&ours)?;
            host.run(
                "n=0; until grep -qi ':4853 [0-9A-F:]* 0A ' /proc/net/tcp; do sleep 0.1; \
                 n=$((n+1)); [ $n -lt 300 ] || exit 1; done",
                SET_UP,
            )?;
            let client = peer.run(&format!("{theirs} 10.0.0.1"), PINGPONG)?;
            let served = host.wait(server, PINGPONG)?;
            table.push(both("pingpong: the guest serves", &client, &served));
        }
        Ok(())
    }
}

/// A row of two programs that must both end well.
fn both(name: &str, client: &Output, server: &Output) -> Row {
    let ok = client.ok() && server.ok() && client.text.contains("usec/iter");
    eprintln!("{name}: client {:?}, server {:?}", client.status, server.status);
    eprintln!("{}\n{}", client.text.trim_end(), server.text.trim_end());
    Row::verdict(name, ok)
}
