//! Two VFs of one NIC, each with an RDMA device, and another machine on the NIC's cable that they
//! talk to: rdma_rxe everywhere, since the emulated NIC has no RDMA of its own.
//!
//! The peer is a VM of its own, because one kernel is no two hosts: what a VF of it sends to
//! another it would deliver by itself, and whatever policy routing makes of that, the RDMA core
//! looks an address up at its own time and by its own rules.

/// Shell: `carry PF` puts `rxevf0` on VF 0 with the address 10.11.0.1 and `rxevf1` on VF 1 with
/// 10.12.0.1; PF is a PCI address. Each answers for its own address only.
pub(super) const CARRY: &str = r#"
carry() {
  echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore
  echo 2 > /proc/sys/net/ipv4/conf/all/arp_announce
  for n in 0 1; do
    i=$(ls /sys/bus/pci/devices/$1/virtfn$n/net)
    ip link set $i up
    ip addr add 10.1$((n+1)).0.1/24 dev $i
    rdma link add rxevf$n type rxe netdev $i
  done
}
"#;

/// The peer's addresses, one in each VF's network.
pub(super) const PEER_ADDRESSES: [[u8; 4]; 2] = [[10, 11, 0, 200], [10, 12, 0, 200]];

/// What makes a VM the peer. Pods call it from their own network, behind the VM with the VFs.
pub(super) const PEER: &str = "set -e
modprobe -a rdma_rxe ib_uverbs
ip addr add 10.11.0.200/24 dev eth0; ip addr add 10.12.0.200/24 dev eth0
ip route add 10.222.0.0/24 via 10.11.0.1
rdma link add rxe0 type rxe netdev eth0
";

/// The index of the GID that a device has from an IPv4 address, as a script that prints it: the
/// kernel adds GIDs in its own time.
pub(super) fn find_gid(device: &str, address: [u8; 4]) -> String {
    let [a, b, c, d] = address;
    format!(
        "for n in $(seq 100); do
for f in /sys/class/infiniband/{device}/ports/1/gids/*; do \
    grep -q 'ffff:{a:02x}{b:02x}:{c:02x}{d:02x}' $f && basename $f && exit; done
sleep 0.2; done; exit 1"
    )
}
