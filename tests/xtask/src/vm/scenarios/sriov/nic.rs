//! A NIC of the daemon that a VF's RDMA device backs (`--backing rnic:DEVICE`): the middle row of `docs/SRIOV.md`'s table.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::{Host, WAIT};
use crate::vm::scenarios::vfs::{CARRY, find_gid};

/// A daemon, a virtual guest and a peer, emulated by one CPU.
const CHECK: Duration = Duration::from_secs(480);

/// Does not end before the client, whose NIC would lose its peer.
const SERVE: &str = "ulimit -l unlimited; exec /host/products/vrdma-check -d rxevf1 -g @GID@";

/// The virtual guest starts a daemon of its own, whose NIC is on the first VF.
const CLIENT: &str = "ulimit -l unlimited
export VHOST_RDMA_BIN=/usr/local/bin/vhost-rdma VHOST_RDMA_BACKING=rnic:rxevf0 VHOST_RDMA_PATIENCE=8
cat /sys/class/infiniband/rxevf?/ports/1/hw_counters/sent_pkts
/host/products/check --address 10.13.0.1 --peer 10.13.0.2 --connect 127.0.0.1:18600 --most 4097 write read send || exit 1
cat /sys/class/infiniband/rxevf?/ports/1/hw_counters/sent_pkts";

/// A virtual guest on a NIC of VF 0 and `vrdma-check` on VF 1, which is not ours, look at every byte that goes through the NIC's switch.
pub(super) fn on_a_vf(host: &mut Host) -> Result<()> {
    let (pci, pf) = (host.address.clone(), host.pf.clone());
    // An address that was set through the PF is the interface's only after its driver has begun anew.
    host.vf(&format!("bind {pf}/1"))?;
    host.vf(&format!("unbind {pf}/1"))?;
    host.sh(&format!("set -e; {CARRY} carry {pci} 10.13.0"))?;
    let result = traffic(host);
    let undone = host.sh(&format!("{CARRY} uncarry {pci}"));
    result.and(undone.map(drop))
}

fn traffic(host: &mut Host) -> Result<()> {
    let gid = host.sh(&find_gid("rxevf1", [10, 13, 0, 2]))?;
    let guest = host.guest()?;
    let server = guest.spawn(&SERVE.replace("@GID@", gid.trim()))?;
    guest.must("n=0; until grep -qi ':48A8 ' /proc/net/tcp /proc/net/tcp6; do sleep 0.1; n=$((n+1)); [ $n -lt 300 ] || exit 1; done", WAIT)?;
    let client = guest.run(CLIENT, CHECK)?;
    let served = if client.ok() {
        guest.wait(server, WAIT)?
    } else {
        guest.kill(server)?;
        client.clone()
    };
    ensure!(
        client.ok() && served.ok(),
        "client {:?}: {}\nserver {:?}: {}",
        client.status,
        client.text,
        served.status,
        served.text
    );
    for op in ["Write", "Read", "Send"] {
        ensure!(
            client.text.lines().any(|line| line.starts_with(op) && line.ends_with("verified")),
            "no verified {op}: {}",
            client.text
        );
    }
    let sent: Vec<u64> = client.text.lines().filter_map(|line| line.trim().parse().ok()).collect();
    ensure!(
        matches!(sent[..], [a, b, after_a, after_b] if after_a > a && after_b > b),
        "the VFs' devices did not carry it: {}",
        client.text
    );
    Ok(())
}
