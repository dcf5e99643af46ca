//! rdma_cm with a third-party host: rdma-core's `ucmatose` on plain rxe and a virtual guest, each
//! as server and as client.
//!
//! The guest's side of the conversation is the datagrams of a connection manager; the daemon joins
//! them with the host's (librdmacm). The guest chooses a PSN of its own, so data flows only if the
//! host's takes its place.

use std::time::Duration;

use anyhow::Result;

use super::{Args, SET_UP};
use crate::rows::Row;
use crate::vm::guest::{Guest, Output};

const PLAY: Duration = Duration::from_secs(180);

impl Args {
    /// `ucmatose` on plain rxe with a virtual guest, both ways.
    pub(super) fn rdma_cm(
        &self,
        host: &mut Guest,
        peer: &mut Guest,
        table: &mut Vec<Row>,
    ) -> Result<()> {
        const OURS: &str = "ulimit -l unlimited; export VHOST_RDMA_BIN=/host/products/vhost-rdma \
            VHOST_RDMA_BACKING=rnic:rxe0
rm -f /tmp/cm.out
/host/products/pingpong --address 10.0.0.1 --peer 10.0.0.200 --cm 10.0.0.200 --port 7471 --size \
    1000 --iterations 100 @MORE@ > /tmp/cm.out 2>&1
status=$?; cat /tmp/cm.out; exit $status";
        const READY: &str =
            "n=0; until @TEST@; do sleep 0.2; n=$((n+1)); [ $n -lt 300 ] || exit 1; done";
        let ready = |test: &str| READY.replace("@TEST@", test);
        if self.wanted("rdma_cm: rxe serves") {
            let server =
                peer.spawn("ulimit -l unlimited; exec ucmatose -b 10.0.0.200 -C 100 -S 1000")?;
            peer.run(
                &ready("rdma resource show cm_id | grep -q ':7471.*LISTEN\\|LISTEN.*:7471'"),
                SET_UP,
            )?;
            let client = host.run(&OURS.replace("@MORE@", "--connect 10.0.0.200:7471"), PLAY)?;
            let served = peer.wait(server, PLAY)?;
            table.push(both("rdma_cm: rxe serves", &client, &served));
        }
        if self.wanted("rdma_cm: the guest serves") {
            let server = host.spawn(&OURS.replace("@MORE@", ""))?;
            host.run(&ready("grep -q 'waiting for a connection' /tmp/cm.out"), SET_UP)?;
            let client =
                peer.run("ulimit -l unlimited; exec ucmatose -s 10.0.0.1 -C 100 -S 1000", PLAY)?;
            let served = host.wait(server, PLAY)?;
            table.push(both("rdma_cm: the guest serves", &client, &served));
        }
        Ok(())
    }
}

/// A row of two programs that must both end well.
fn both(name: &str, client: &Output, server: &Output) -> Row {
    let told = |output: &Output| {
        output.text.contains("data transfers complete")
            || output.text.contains("100 messages of 1000 bytes each way")
    };
    eprintln!("{name}: client {:?}, server {:?}", client.status, server.status);
    eprintln!("{}\n{}", client.text.trim_end(), server.text.trim_end());
    Row::verdict(name, client.ok() && server.ok() && told(client) && told(server))
}
