//! Two VFs of one NIC as two hosts would be, each with an RDMA device: rdma_rxe, since the emulated NIC has none of its own.

/// Shell: `carry PF PREFIX` puts `rxevf0` on VF 0 with the address PREFIX.1 and `rxevf1` on VF 1 with PREFIX.2; PF is a PCI address. `uncarry PF` takes
/// all of it away.
///
/// In one network namespace the kernel would deliver what one sends to the other by itself, without either. The rules make it go out of the one,
/// through the NIC's switch, and into the other.
pub(super) const CARRY: &str = r#"
vf() { ls /sys/bus/pci/devices/$1/virtfn$2/net; }
carry() {
  for n in 0 1; do
    i=$(vf $1 $n)
    echo 1 > /proc/sys/net/ipv4/conf/$i/accept_local
    echo 0 > /proc/sys/net/ipv4/conf/$i/rp_filter
    ip link set $i up
    ip addr add $2.$((n+1))/24 dev $i
    rdma link add rxevf$n type rxe netdev $i
    ip rule add pref 1 iif $i lookup local
    ip route add $2.$((2-n)) dev $i table 20$n
    ip rule add pref 10 from $2.$((n+1)) to $2.$((2-n)) lookup 20$n
  done
  echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
  ip rule add pref 100 lookup local
  ip rule del pref 0
}
uncarry() {
  ip rule add pref 0 lookup local
  ip rule del pref 100
  for n in 0 1; do
    rdma link delete rxevf$n
    ip rule del pref 1
    ip rule del pref 10
    ip route flush table 20$n
    ip addr flush dev $(vf $1 $n)
  done
}
"#;

/// The index of the GID that a device has from an IPv4 address, as a script that prints it: the kernel adds GIDs in its own time.
pub(super) fn find_gid(device: &str, address: [u8; 4]) -> String {
    let [a, b, c, d] = address;
    format!(
        "for n in $(seq 100); do
for f in /sys/class/infiniband/{device}/ports/1/gids/*; do grep -q 'ffff:{a:02x}{b:02x}:{c:02x}{d:02x}' $f && basename $f && exit; done
sleep 0.2; done; exit 1"
    )
}
