//! A NIC of a guest on the RDMA device of a virtual function: the daemon in the VM, a virtual guest
//! on its socket, and over the emulated NIC's switch and its cable a peer in another VM, with rxe
//! and a program of libibverbs, that knows nothing of us. Every byte is looked at.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::Host;
use crate::cache::Cache;
use crate::host::RNIC_PACKAGES;
use crate::host::ensure_packages;
use crate::roots::Debian;
use crate::vm::daemon;
use crate::vm::scenarios::rnic::verified::{self, meet};

const TALK: Duration = Duration::from_secs(600);
const SET_UP: Duration = Duration::from_secs(300);
/// What both sides say of the addresses 10.0.0.1 (the VF's) and 10.0.0.200 (the peer's).
const GUEST: &str = "--address 10.0.0.1 --peer 10.0.0.200";
const OPS: &str = "write read send";

/// The third-party host.
const PEER: &str = "set -e
ip addr flush dev eth0 to 10.0.0.0/16; ip addr add 10.0.0.200/24 dev eth0
modprobe -a rdma_rxe ib_uverbs
[ -e /sys/class/infiniband/rxe0 ] || rdma link add rxe0 type rxe netdev eth0
";

/// A daemon with a NIC that nobody has connected to, and its end.
const IDLE: &str = "set -e
vhost-rdma serve --ephemeral --runtime-dir /run/v > /tmp/vf.log 2>&1 & echo $! > /tmp/vf.pid
n=0; until [ -S /run/v/admin.sock ]; do sleep 0.2; n=$((n+1)); [ $n -lt 100 ] || { \
    cat /tmp/vf.log; exit 1; }; done
vhost-rdma --socket /run/v/admin.sock network add net
vhost-rdma --socket /run/v/admin.sock nic add vm1 --network net --backing rnic:rxevf --address \
    10.0.0.1
";
const END: &str = "p=$(cat /tmp/vf.pid); kill $p
n=0; while [ -d /proc/$p ] && ! grep -q zombie /proc/$p/status; do sleep 0.2; n=$((n+1)); \
    [ $n -lt 100 ] || exit 1; done";

/// The daemon with its backing, and the programs of both sides.
pub(super) fn products(cache: &Cache, debian: Debian) -> Result<Vec<PathBuf>> {
    ensure_packages(cache, RNIC_PACKAGES)?;
    let mut products = vec![daemon::build_with(cache, &["host-rnic"])?];
    products.extend(crate::vm::scenarios::rnic::peers(cache)?);
    products.extend(crate::products::programs(cache, debian)?);
    Ok(products)
}

/// VF 0 with an address and a device, as long as `work` takes; what the daemon uses is a function
/// by all that `vf` says of it.
fn on_vf(host: &mut Host, work: impl FnOnce(&mut Host) -> Result<()>) -> Result<()> {
    let (guest, peer) = host.lab.pair()?;
    peer.must(PEER, SET_UP)?;
    let address = &host.address;
    guest.must(
        &format!(
            "set -e; i=$(ls /sys/bus/pci/devices/{address}/virtfn0/net); ip link set $i up
            ip addr add 10.0.0.1/24 dev $i; rdma link add rxevf type rxe netdev $i
            n=0; until ping -c 1 -W 1 10.0.0.200; do n=$((n+1)); [ $n -lt 60 ] || exit 1; done
            ip route get 10.0.0.200 | grep -q \"dev $i\""
        ),
        SET_UP,
    )?;
    let shown = host.vf("show rxevf")?;
    ensure!(
        shown.get("index").and_then(serde_json::Value::as_u64) == Some(0),
        "the RDMA device is shown on another function: {shown}"
    );
    let result = work(host);
    host.sh(&format!(
        "rdma link delete rxevf; ip addr flush dev $(ls /sys/bus/pci/devices/{}/virtfn0/net)",
        host.address
    ))?;
    result
}

/// `says` is what a client prints when all went well.
fn judge(
    (client, server): (crate::vm::guest::Output, crate::vm::guest::Output),
    says: &str,
) -> Result<()> {
    let ok = client.ok() && server.ok() && client.text.contains(says);
    ensure!(
        ok,
        "client {:?}: {}\nserver {:?}: {}",
        client.status,
        client.text,
        server.status,
        server.text
    );
    Ok(())
}

/// The guest connects to the peer.
pub(super) fn calls(host: &mut Host) -> Result<()> {
    on_vf(host, |host| {
        let client = format!("{GUEST} --connect 10.0.0.200:18600 {OPS}");
        let client = verified::ours("rnic:rxevf", &client);
        let (guest, peer) = host.lab.pair()?;
        let said = meet((peer, &verified::theirs("")), (guest, &client), verified::PORT, TALK)?;
        judge(said, "Send: 84 messages")
    })
}

/// The peer connects to the guest; meanwhile the function is in use, and says by whom.
pub(super) fn serves(host: &mut Host) -> Result<()> {
    on_vf(host, |host| {
        let client = verified::theirs(&format!("-c 10.0.0.1 -s 65537 {OPS}"));
        let server = verified::ours("rnic:rxevf", GUEST);
        let (guest, peer) = host.lab.pair()?;
        let said = meet((guest, &server), (peer, &client), verified::PORT, TALK)?;
        judge(said, "\"op\":\"send\",\"ok\":true")?;
        let pf = host.pf.clone();
        host.sh(IDLE)?;
        let shown = host.vf("show rxevf")?;
        let named = shown.to_string().contains("vhost-rdma");
        let refused =
            host.fails(&format!("create {pf} 0 --yes"), 5, "(vhost-rdma) has /dev/infiniband/");
        host.sh(END).context("the daemon does not end")?;
        ensure!(named, "the daemon that has it open is not shown: {shown}");
        refused
    })
}
