//! Our libraries on a host that has an RDMA device of its own: rdma_rxe, which is a kernel's device
//! like any RNIC to them.
//!
//! One program has both: it lists them, reaches each by verbs, and listens for rdma_cm at the
//! wildcard address, where clients come by our NIC and by the kernel's. The event channel of such a
//! program is a set of both (`process/patches/0003`).

/// The row.
pub(super) const NAME: &str = "a program, beside a kernel's device";

/// As root: a kernel's device belongs to it. rxe reaches itself by its own address.
pub(super) const SCRIPT: &str = "set -e
cp -u /host/products/vhost-rdma /tmp; cp -r /host/libraries /tmp
modprobe dummy && modprobe rdma_rxe && modprobe rdma_ucm
ip link add own0 type dummy; ip address add 10.20.0.1/24 dev own0; ip link set own0 up
rdma link add rxe0 type rxe netdev own0
cat > /tmp/both <<'END'
set -e
set -- $VHOST_RDMA_ADDRESSES
ibv_devices
rxe=$(grep -ls ':ffff:0a14:0001$' /sys/class/infiniband/rxe0/ports/1/gids/* | head -n 1)
for it in rxe0:${rxe##*/} vhost_rdma0:0 vhost_rdma1:0; do
  device=${it%:*}; gid=${it#*:}
  ibv_devinfo -d $device | grep -q PORT_ACTIVE
  ping=\"ibv_rc_pingpong -c -d $device -g $gid\"
  $ping > /tmp/served 2>&1 &
  n=0
  until $ping 127.0.0.1; do n=$((n+1)); [ $n -lt 50 ]; sleep 0.2; done
  wait $!
  echo \"$device: pingpong\"
done
rping -s -P > /tmp/served 2>&1 &
for address in 10.20.0.1 $1; do
  n=0
  until rping -c -a $address -v -C 10 > /tmp/pings; do n=$((n+1)); [ $n -lt 50 ]; sleep 0.2; done
  [ $(grep -c '^ping data: rdma-ping-' /tmp/pings) -eq 10 ]
  echo \"$address: rping\"
done
kill $!
END
VHOST_RDMA_LIBRARIES=/tmp/libraries /tmp/vhost-rdma run --nics 2 -- sh /tmp/both
rdma link delete rxe0; ip link delete own0; modprobe -r rdma_rxe
";
