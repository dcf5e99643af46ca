# SPDX-License-Identifier: Apache-2.0 OR MIT
# Which network interface the driver takes for its own: sh companion-check.sh
# The driver is loaded and paired with eth0. Its interface is taken away, impostors with its MAC
# address are made, and none of them may become its companion; the right one comes back. Prints
# "ok NAME" or "fail NAME: why".
failed=0
ok() { echo "ok $1"; }
fail() { echo "fail $1: $2"; failed=1; }
devices() { ls /sys/class/infiniband | tr '\n' ' '; }
wait_for() {
  n=0; until "$@" >/dev/null 2>&1; do sleep 0.1; n=$((n+1)); [ $n -lt 100 ] || return 1; done
}
one() { [ -n "$(devices)" ]; }
none() { [ -z "$(devices)" ]; }
# Long enough for a work item of the driver; where there is nothing to wait for.
still_none() { sleep 1; if none; then ok "$1"; else fail "$1" "$(rdma link | tr '\n' ' ')"; fi; }

modprobe -a dummy veth
mac=$(cat /sys/class/net/eth0/address)
nic=$(basename "$(readlink -f /sys/class/net/eth0/device)")
rmmod virtio_rdma
echo "$nic" > /sys/bus/virtio/drivers/virtio_net/unbind
wait_for test ! -e /sys/class/net/eth0
if [ -e /sys/class/net/eth0 ]; then
	fail "the interface goes" "$(ip -br link | tr '\n' ' ')"
else
	ok "the interface goes"
fi

# A user namespace gives everybody a network namespace of his own.
unshare --user --map-root-user --net sh -c "
	ip link add impostor type dummy && ip link set impostor address $mac up &&
	ip link add left type veth peer name right && ip link set left address $mac up &&
	touch /tmp/impostor.up && sleep 1000" > /tmp/impostor.log 2>&1 &
impostor=$!
wait_for test -e /tmp/impostor.up
if [ -e /tmp/impostor.up ]; then
	ok "impostors in a namespace"
else
	fail "impostors in a namespace" "$(cat /tmp/impostor.log)"
fi
insmod /host/products/virtio_rdma.ko
still_none "a namespace of others has no companion"
ip link add impostor type dummy && ip link set impostor address "$mac" up
still_none "a dummy is no companion"
ip link del impostor
kill $impostor

echo "$nic" > /sys/bus/virtio/drivers/virtio_net/bind
wait_for one
dev=$(ls /sys/class/infiniband)
if rdma link show "$dev/1" | grep -q 'netdev eth0'; then
	ok "the right interface"
else
	fail "the right interface" "$(rdma link | tr '\n' ' ')"
fi
exit $failed
