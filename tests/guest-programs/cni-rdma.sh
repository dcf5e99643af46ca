# SPDX-License-Identifier: Apache-2.0 OR MIT
# The CNI plugin with a real RDMA device: into a pod, used there, back; killed at every step:
# sh cni-rdma.sh DEVICE PEER
# PEER serves ibv_rc_pingpong on port 18600 in a loop. Prints "ok NAME" or "fail NAME: why"; exit
# status 0 only if all was right.
dev=$1
peer=$2
bin=/host/cni
failed=0
ok() { echo "ok $1"; }
fail() { echo "fail $1: $2"; failed=1; }
must() {
  name=$1; shift
  if out=$("$@" 2>&1); then ok "$name"
  else fail "$name" "$(echo "$out" | tail -6 | tr '\n' ' ')"; fi
}
wait_for() {
  n=0; until "$@" >/dev/null 2>&1; do sleep 0.1; n=$((n+1)); [ $n -lt 100 ] || return 1; done
}
gid() {
  for g in /sys/class/infiniband/$dev/ports/1/gids/*; do
    case $(cat $g 2>/dev/null) in *:ffff:0a09:0001) echo "${g##*/}"; return 0;; esac
  done
  return 1
}
pingpong() {
  g=$(gid) || { echo "no GID of 10.9.0.1"; return 1; }
  n=0
  until timeout 60 ibv_rc_pingpong -d $dev -g $g -n 100 -c -p 18600 $peer; do
    n=$((n+1)); [ $n -lt 5 ] || return 1; sleep 1
  done
}
case $3 in
  gid|pingpong) "$3"; exit;;
esac
in_pod() { ip netns exec pod "$@"; }

# --- What the plugin is given.
mkdir -p /run/cnitest/bin
cat > /run/cnitest/bin/ipam <<'END'
#!/bin/sh
f=/run/cnitest/given.$CNI_CONTAINERID.$CNI_IFNAME
case $CNI_COMMAND in
  ADD) : > $f; echo '{"cniVersion":"1.0.0","ips":[{"address":"10.9.0.1/24"}]}';;
  DEL) rm -f $f;;
  CHECK) test -e $f;;
esac
END
chmod +x /run/cnitest/bin/ipam
pci=$(basename $(dirname $(readlink -f /sys/class/net/eth0/device)))
mac=$(cat /sys/class/net/eth0/address)
nics() {
  cat > /run/cnitest/nics.json <<END
[{"id": "vf-0", "pool": "vf", "network": "", "if_name": "net1", "mtu": 1400, "kind": "vf",
  "pci": "$pci", "netdev": "eth0", "rdma_device": "$dev", "netns_mode": "$1"}]
END
}
config() {
  echo "{\"cniVersion\": \"1.1.0\", \"name\": \"blue\", \"type\": \"vhost-rdma\",
    \"ipam\": {\"type\": \"ipam\"}, \"cni.dev/valid-attachments\": [] $1}"
}
agent() {
  [ -z "$agent" ] || { kill $agent; wait $agent 2>/dev/null; }
  rm -f /run/cnitest/agent.sock
  $bin/test-agent /run/cnitest/agent.sock /run/cnitest/nics.json & agent=$!
  wait_for test -S /run/cnitest/agent.sock
}
# command, namespace, program before the plugin...
cni() {
  command=$1 netns=$2; shift 2
  config "$prev" | env -i PATH=$PATH CNI_COMMAND=$command CNI_CONTAINERID=c1 CNI_NETNS=$netns \
    CNI_IFNAME=eth1 CNI_PATH=/run/cnitest/bin \
    VHOST_RDMA_AGENT_SOCKET=/run/cnitest/agent.sock \
    "CNI_ARGS=K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0" "$@" $bin/vhost-rdma-cni
}
pod=/run/netns/pod
state() {
  ip -o link show eth0 | grep -o 'mtu [0-9]*\|state [A-Z]*\|link/ether [0-9a-f:]*' | tr '\n' ' '
  ip -o -4 addr show eth0 | grep -o 'inet [0-9./]*'
  cat /sys/class/net/eth0/ifalias
  ls /sys/class/infiniband
}
home() {
  now=$(state 2>&1)
  [ "$now" = "$before" ] || { echo "before: $before; now: $now"; ip link; rdma dev; return 1; }
  left=$(ls /run/cnitest | grep given)
  [ -z "$left" ] || { echo "not given back: $left"; return 1; }
}

ip link set eth0 alias "uplink of rack 9"
before=$(state)
agent=
prev=

# --- Exclusive mode.
must "exclusive mode" rdma system set netns exclusive
must "a pod" ip netns add pod
must "its lo" in_pod ip link set lo up
nics exclusive
agent
result=$(cni ADD $pod); status=$?
[ $status = 0 ] && ok "ADD" || fail "ADD" "$result"
[ -e /sys/class/infiniband/$dev ] && fail "device gone from here" "$(ls /sys/class/infiniband)" ||
  ok "device gone from here"
[ -e /sys/class/net/eth0 ] && fail "interface gone from here" "it is there" ||
  ok "interface gone from here"
must "device in the pod" in_pod test -e /sys/class/infiniband/$dev
must "interface in the pod, as asked" \
  in_pod sh -c 'ip -o link show net1 | grep -q "mtu 1400.*state UP"'
must "its GID in the pod" wait_for in_pod sh $0 $dev $peer gid
must "ibv_rc_pingpong from the pod to the other guest" in_pod sh $0 $dev $peer pingpong
prev=", \"prevResult\": $result"
must "CHECK" cni CHECK $pod
must "the netlink crate and rdma say the same" \
  python3 -W ignore /host/rdma-compare.py $bin/rdma-json $dev $pod
in_pod ip link set net1 down
cni CHECK $pod | grep -q 'net1 in the pod is down' && ok "CHECK sees a link that is down" ||
  fail "CHECK sees a link that is down" "it does not"
must "DEL" cni DEL $pod
must "everything is as before" home
for n in 1 2 3 4; do
  cni DEL $pod || fail "DEL again" "$n"
  cni DEL "" || fail "DEL without a namespace" "$n"
done
must "and after eight more DELs" home
must "its GID here" wait_for gid
must "ibv_rc_pingpong from here" pingpong

# --- The pod's namespace ends before DEL comes: the kernel gives back what was in it, under the
# pod's names.
must "ADD once more" cni ADD $pod
ip netns del pod
must "DEL after the namespace's end" cni DEL ""
must "everything is as before, after the namespace's end" home
ip netns add pod

# --- The pod calls both devices otherwise, and its interface like the host's as well.
rename() {
  in_pod rdma dev set $dev name mine && in_pod ip link set net1 down &&
    in_pod ip link set net1 name x && in_pod ip link property add dev x altname eth0 &&
    in_pod ip link property add dev x altname net1
}
must "ADD for a pod that renames" cni ADD $pod
must "the pod renames" rename
must "DEL of what was renamed" cni DEL $pod
must "everything is as before, names too" home
must "ADD for another pod that renames" cni ADD $pod
must "that pod renames" rename
ip netns del pod
must "DEL of what was renamed, after the namespace's end" cni DEL ""
must "everything is as before, names too, after the namespace's end" home
ip netns add pod
in_pod ip link set lo up

# --- Killed by -9 at each netlink request of ADD and of DEL, then DEL or GC.
kills=0
for command in ADD DEL; do
  number=0
  while number=$((number+1)); [ $number -lt 60 ]; do
    [ $command = ADD ] || cni ADD $pod >/dev/null || fail "ADD before a killed DEL" "$number"
    cni $command $pod strace -f -qq -o /dev/null -e trace=sendto \
      -e inject=sendto:signal=KILL:when=$number >/tmp/killed 2>&1
    status=$?
    if [ $status = 0 ]; then
      [ $command = DEL ] || cni DEL $pod
      break
    fi
    kills=$((kills+1))
    [ ! -s /tmp/killed ] || grep -q Killed /tmp/killed ||
      fail "$command killed at $number" "$(cat /tmp/killed)"
    how=$([ $((number % 2)) = 0 ] && echo DEL || echo GC)
    out=$(cni $how $pod) || fail "$how after $command was killed at $number" "$out"
    why=$(home) || {
      fail "home after $command was killed at $number and $how" \
        "$(echo "$why" | tail -8 | tr '\n' ' ')"
      agent
    }
  done
done
[ $kills -gt 20 ] && ok "killed at each of its requests ($kills times)" ||
  fail "killed at each of its requests" "only $kills times"
must "its GID here after all that" wait_for gid
must "ibv_rc_pingpong after all that" pingpong

# --- Shared mode: the interface moves, the device is to be seen everywhere.
ip netns del pod
must "shared mode" wait_for rdma system set netns shared
ip netns add pod
in_pod ip link set lo up
prev=
out=$(cni ADD $pod)
echo "$out" | grep -q 'shared mode' && ok "a host in the other mode is refused" ||
  fail "a host in the other mode is refused" "$out"
must "and is as before" home
nics shared
agent
result=$(cni ADD $pod) && ok "ADD in shared mode" || fail "ADD in shared mode" "$result"
must "device still here" test -e /sys/class/infiniband/$dev
must "and in the pod" in_pod test -e /sys/class/infiniband/$dev
must "its GID in the pod, shared" wait_for in_pod sh $0 $dev $peer gid
must "ibv_rc_pingpong from the pod, shared" in_pod sh $0 $dev $peer pingpong
prev=", \"prevResult\": $result"
must "CHECK, shared" cni CHECK $pod
must "DEL, shared" cni DEL $pod
must "everything is as before, shared" home
must "its GID here, shared" wait_for gid
must "ibv_rc_pingpong from here, shared" pingpong
# --- A function that has no RDMA device of its own to lose is made as new: its driver lets it go
# and takes it again, also when it was left without one.
prev=
index() { cat /sys/class/net/eth0/ifindex; }
nics shared
sed -i "s/\"rdma_device\": \"$dev\"/\"rdma_device\": \"\"/" /run/cnitest/nics.json
agent
was=$(index)
must "ADD of a function that is made as new" cni ADD $pod
must "what the pod leaves on it" \
  in_pod ip link add link net1 name tap0 type macvlan mode passthru
must "DEL of a function that is made as new" cni DEL $pod
must "everything is as before, as new" home
[ "$(index)" != "$was" ] && ok "it is another interface" || fail "it is another interface" "$was"
in_pod test -e /sys/class/net/tap0 && fail "nothing is on top of it" "tap0 is" ||
  ok "nothing is on top of it"
must "ADD of it once more" cni ADD $pod
must "its driver lets it go" sh -c "echo $pci > /sys/bus/pci/devices/$pci/driver/unbind"
must "DEL of a function without a driver" cni DEL $pod
must "everything is as before, without a driver too" home
must "its GID here, as new" wait_for gid
must "ibv_rc_pingpong from here, as new" pingpong
ip netns del pod
rdma system set netns exclusive
kill $agent
exit $failed
