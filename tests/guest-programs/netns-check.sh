# SPDX-License-Identifier: Apache-2.0 OR MIT
# Moves an RDMA device and its network interface between network namespaces and uses it in each:
# sh netns-check.sh DEVICE
# Prints "ok NAME" or "fail NAME: why"; exit status 0 only if all was right.
dev=$1
failed=0
ok() { echo "ok $1"; }
fail() { echo "fail $1: $2"; failed=1; }
# name, command...
must() {
  name=$1; shift
  if out=$("$@" 2>&1); then ok "$name"
  else fail "$name" "$(echo "$out" | tail -4 | tr '\n' ' ')"; fi
}
here() { [ -e /sys/class/infiniband/$dev ]; }
# Only sysfs as mounted inside shows the devices of a namespace: `ip netns exec` mounts it anew.
in_red() { ip netns exec red "$@"; }
wait_for() {
  n=0; until "$@" >/dev/null 2>&1; do sleep 0.1; n=$((n+1)); [ $n -lt 100 ] || return 1; done
}
# Prints the index of the GID of 10.9.0.1.
gid() {
  for g in /sys/class/infiniband/$dev/ports/1/gids/*; do
    case $(cat $g 2>/dev/null) in *:ffff:0a09:0001) echo "${g##*/}"; return 0;; esac
  done
  return 1
}
pingpong() {
  g=$(gid) || { echo "no GID of 10.9.0.1"; return 1; }
  timeout 60 ibv_rc_pingpong -d $dev -g $g -n 50 -c -p 20002 > /tmp/pp.server 2>&1 &
  n=0; until grep -qi ':4E22 [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6; do
    sleep 0.1; n=$((n+1)); [ $n -lt 200 ] || return 1
  done
  timeout 60 ibv_rc_pingpong -d $dev -g $g -n 50 -c -p 20002 127.0.0.1 && wait $!
}
cm() {
  timeout 60 rping -s -a 10.9.0.1 -C 5 > /tmp/rping.server 2>&1 &
  sleep 1
  timeout 60 rping -c -a 10.9.0.1 -v -C 5 && wait $!
}
case $2 in
  gid|pingpong|cm) "$2"; exit;;
esac

addresses() { ip addr show eth0 | grep -q 'inet 10.9.0.1/'; }
# The kernel moderates for its own users where the driver can.
must "adaptive moderation" sh -c "rdma dev set $dev adaptive-moderation on &&
  rdma -d dev show $dev | grep -q 'adaptive-moderation on'"
must "exclusive mode" rdma system set netns exclusive
must "make a namespace" ip netns add red
# The way back: `rdma` knows namespaces by name only.
must "name our own" ip netns attach home 1

# A program that has the device open when it goes: its verbs fail from then on, and it ends by
# itself.
g=$(gid)
timeout 100 ib_write_bw -d $dev -x $g -D 90 -s 4096 -F -p 20003 > /tmp/bw.server 2>&1 & server=$!
sleep 2
timeout 100 ib_write_bw -d $dev -x $g -D 90 -s 4096 -F -p 20003 127.0.0.1 \
  > /tmp/bw.client 2>&1 & client=$!
sleep 4
[ "$(rdma resource show qp | grep -c ib_write_bw)" -ge 2 ] && ok "a program runs" ||
  fail "a program runs" "$(tail -3 /tmp/bw.client | tr '\n' ' ')"

must "device to the namespace" rdma dev set $dev netns red
here && fail "gone from here" "still in /sys/class/infiniband" || ok "gone from here"
must "present there" in_red test -e /sys/class/infiniband/$dev
n=0; while kill -0 $client 2>/dev/null && [ $n -lt 300 ]; do sleep 0.1; n=$((n+1)); done
if kill -0 $client 2>/dev/null; then fail "the program ends" "it still runs after 30 s"
else ok "the program ends"; fi
kill $server $client 2>/dev/null; wait

must "interface to the namespace" ip link set eth0 netns red
in_red sh -c 'ip link set lo up; ip link set eth0 up; ip addr add 10.9.0.1/24 dev eth0'
must "its GID follows" wait_for in_red sh $0 $dev gid
must "traffic in the namespace" in_red sh $0 $dev pingpong
must "connection manager in the namespace" in_red sh $0 $dev cm
must "the link names its interface" \
  in_red sh -c "rdma link show $dev/1 | grep -q 'state ACTIVE.* netdev eth0'"
must "resources in the namespace" \
  in_red sh -c "rdma resource show qp link $dev/1 | grep -q 'type GSI.*ib_core'"
[ -z "$(rdma dev | grep $dev)" ] && ok "not listed here" || fail "not listed here" "$(rdma dev)"

must "device back" in_red rdma dev set $dev netns home
must "interface back" in_red ip link set eth0 netns 1
ip link set eth0 up; addresses || ip addr add 10.9.0.1/24 dev eth0
must "its GID comes back" wait_for gid
must "traffic at home again" pingpong
must "connection manager at home again" cm

# The end of a namespace gives the device back.
must "there once more" rdma dev set $dev netns red
ip netns del red
ip netns del home
must "home when the namespace ends" wait_for here
must "traffic after the namespace" pingpong
exit $failed
