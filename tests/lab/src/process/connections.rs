//! Programs of rdma_cm: rdmacm-utils, and perftest's `-R`. Each end has one NIC, as if it were on a
//! machine of its own, and finds the other by its address.

use super::release::Release;
use crate::roots::Debian;
use crate::vm::scenarios::neighbour::CALLED_TOO_EARLY;

/// The addresses of the NICs in order (`$A`, `$B`, `$C`), and one NIC for who is behind `nic N`.
const PLACES: &str = r#"set -- $VHOST_RDMA_ADDRESSES; A=$1; B=$2; C=$3
nic() { n=$1; shift; VHOST_RDMA_DEVICES=/run/sockets/$n timeout 60 "$@"; }
"#;

/// The server is there when somebody listens, which the client tries again and again. Who lost
/// perftest's own race meets once more ([`CALLED_TOO_EARLY`]).
const BOTH: &str = r#"meet() {
  nic 0 $SERVER > /tmp/server 2>&1 & server=$!
  for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
    sleep 0.2
    if nic 1 $CLIENT > /tmp/client 2>&1; then
      wait $server && grep -qE '$SAID' /tmp/client && exit 0; break
    fi
    kill -0 $server 2> /dev/null || break
  done
  kill $server 2> /dev/null || true; wait $server || true
}
for meeting in 1 2 3 4 5 6; do meet; grep -qF "$TOO_EARLY" /tmp/client || break; done
(echo "server:"; cat /tmp/server; echo "client:"; cat /tmp/client) >&2; exit 1
"#;

/// cmtime's ends agree over TCP as well, under the address that they connect to.
const CMTIME: &str = r#"ip address add $A/32 dev lo
nic 0 cmtime -c 50 > /tmp/server 2>&1 & server=$!
for i in 1 2 3 4 5 6 7 8 9 10; do
  sleep 0.3; grep -qi ':1D2F [0-9A-F:]* 0A ' /proc/net/tcp* && break
done
nic 1 cmtime -s $A -c 50 > /tmp/client 2>&1 && wait $server && exit 0
(echo "server:"; cat /tmp/server; echo "client:"; cat /tmp/client) >&2; exit 1
"#;

/// Those before rdma-core 52 (Debian 12, Ubuntu 24.04) agree on nothing, and the server has no end:
/// it asks for events for ever (librdmacm/examples/cmtime.c, `process_events()`). The client tells
/// what fails, and counts it as done.
const OLD_CMTIME: &str = r#"nic 0 cmtime -c 50 > /tmp/server 2>&1 & server=$!
for i in 1 2 3 4 5 6 7 8 9 10; do
  sleep 0.3; nic 1 cmtime -s $A -c 50 > /tmp/client 2>&1 || break
  if ! grep -qiE 'error|fail' /tmp/client && grep -q '^disconnect ' /tmp/client; then
    kill $server && exit 0; break
  fi
done
(echo "server:"; cat /tmp/server; echo "client:"; cat /tmp/client) >&2; exit 1
"#;

/// That of rdma-core 65 is told who keeps the ends in step, and where each of them is.
const NEXT_CMTIME: &str = r#"for it in $A $B; do ip address add $it/32 dev lo; done
nic 0 cmtime -L -C $A -b $A -c 50 > /tmp/server 2>&1 & server=$!
for i in 1 2 3 4 5 6 7 8 9 10; do
  sleep 0.3; grep -qi ':1D2F [0-9A-F:]* 0A ' /proc/net/tcp* && break
done
nic 1 cmtime -C $A -b $B -c 50 > /tmp/client 2>&1 && wait $server && exit 0
(echo "server:"; cat /tmp/server; echo "client:"; cat /tmp/client) >&2; exit 1
"#;

/// The server of rstream closes as soon as it has sent its last message, and its client, which
/// polls (`-T a`), may find that and the message at once. It takes POLLHUP for the end before it
/// takes the data: `do_poll()` of librdmacm/examples/common.c, where rpoll() says both (rsocket.c,
/// rs_poll_rs). So its status may be 16, POLLHUP, after all that the server has sent; never
/// another.
const POLLED: &str = r#"nic 0 rstream -S 65536 -T a > /tmp/server 2>&1 & server=$!
for i in 1 2 3 4 5 6 7 8 9 10; do
  sleep 0.2
  nic 1 rstream -s $A -S 65536 -T a > /tmp/client 2>&1 && status=0 || status=$?
  case $status in 0|16) wait $server && exit 0; break;; esac
  kill -0 $server 2> /dev/null || break
done
(echo "client ($status):"; cat /tmp/client; echo "server:"; cat /tmp/server) >&2; exit 1
"#;

/// Servers and clients, and what a client has to have said in the end (a regular expression). What
/// is compared, they compare themselves: `-v`, `-T v`.
///
/// rdma_xclient sends its 16 bytes inline through a queue pair for which it has asked no room
/// (librdmacm/examples/rdma_xclient.c: `max_inline_data` is 0): a device grants what there is. Its
/// `-c x` is XRC, which this device does not have.
///
/// Of rdmacm-utils one is not among them, nor in what follows: udpong, of datagram rsockets, makes
/// an address handle without a GRH (librdmacm/rsocket.c, `ds_add_qp_dest()`), which no RoCE device
/// takes: in Linux rdma_check_ah_attr() (drivers/infiniband/core/verbs.c) refuses it.
const PAIRS: &[(&str, &str, &str)] = &[
    ("rping -s -v -C 10", "rping -c -a $A -v -C 10", "^ping data: rdma-ping-9:"),
    (
        "rping -s -a $A -v -C 10 -p 99",
        "rping -c -a $A -I $B -v -C 10 -p 99",
        "^ping data: rdma-ping-9:",
    ),
    ("ucmatose -C 20", "ucmatose -s $A -C 20", "^return status 0"),
    ("ucmatose -c 20 -C 10", "ucmatose -s $A -c 20 -C 10", "^return status 0"),
    ("udaddy", "udaddy -s $A", "^return status 0"),
    ("rdma_server", "rdma_client -s $A", "^rdma_client: end 0"),
    ("rdma_xserver", "rdma_xclient -s $A", "^rdma_xclient: end 0"),
    ("rstream -S 65536 -T v", "rstream -s $A -S 65536 -T v", "^custom +64k "),
    ("rstream -S 4096 -T n -T v", "rstream -s $A -S 4096 -T n -T v", "^custom +4k "),
    (
        "riostream -S 65536 -I 100 -C 1 -T v",
        "riostream -s $A -S 65536 -I 100 -C 1 -T v",
        "^custom +64k ",
    ),
    ("ib_send_bw -R -F -n 500", "ib_send_bw -R -F -n 500 $A", "^ 65536 +500 "),
    ("ib_write_bw -R -F -n 500", "ib_write_bw -R -F -n 500 $A", "^ 65536 +500 "),
    ("ib_write_bw -R -F -n 500 -q 4", "ib_write_bw -R -F -n 500 -q 4 $A", "^ 65536 +2000 "),
    ("ib_send_lat -R -F -n 500 -c UD", "ib_send_lat -R -F -n 500 -c UD $A", "^ 2 +500 "),
];

/// The server writes the file and waits for the next one, for ever.
const RCOPY: &str = r#"head -c 5000001 /dev/urandom > /tmp/original; cd /tmp
VHOST_RDMA_DEVICES=/run/sockets/0 timeout 60 rcopy > /tmp/server 2>&1 & server=$!
for i in 1 2 3 4 5 6 7 8 9 10; do
  sleep 0.3; nic 1 rcopy /tmp/original $A:copy > /tmp/client 2>&1 && break
done
kill $server; wait $server || true
if cmp /tmp/original /tmp/copy && grep -q '5000001 bytes' /tmp/server; then exit 0; fi
(echo "server:"; cat /tmp/server; echo "client:"; cat /tmp/client) >&2; exit 1
"#;

/// One sends to a group that two have joined; each counts what comes, and ends with the last. What
/// is sent before they have joined nobody gets.
const GROUP: &str = r#"for n in 0 1; do
  nic $n stdbuf -oL mckey -m 224.1.2.3 -b $(eval echo \$$((n+1))) -C 20 > /tmp/receiver$n 2>&1 &
  eval receiver$n=$!
done
for n in 0 1; do
  for i in $(seq 100); do grep -q '^mckey: joined' /tmp/receiver$n && break; sleep 0.1; done
done
if nic 2 mckey -m 224.1.2.3 -b $C -s -C 20 > /tmp/sender 2>&1; then
  wait $receiver0 && wait $receiver1 && exit 0
fi
cat /tmp/sender /tmp/receiver0 /tmp/receiver1 >&2; exit 1
"#;

/// With all NICs in one program: which it is, addresses say.
const SEVERAL: &str = r#"timeout 60 rping -s -a $B -v -C 10 > /tmp/server 2>&1 & server=$!
sleep 0.5
timeout 60 rping -c -a $B -I $C -v -C 10 && wait $server && exit 0
cat /tmp/server >&2; exit 1
"#;

/// Threads that wait in channels while these end.
const CHANNELS: &str = "timeout 60 /host/process-channels $A $B 200";

/// NICs of a container for these.
pub(super) const NICS: u32 = 3;

/// Whether a release has a program in a form that comes to an end. Not rping of rdma-core 65: it
/// polls its channel, then reads from it without a limit, and destroys its identifier meanwhile,
/// which takes the event back (librdmacm/examples/rping.c, `cm_thread()`). That may hang with the
/// kernel too; here it does so in one run of three when the machine is busy, after all pings.
fn ends(release: Release, program: &str) -> bool {
    release != Release::Next || !program.starts_with("rping")
}

/// Names, and scripts, for what a release has.
pub(super) fn all(release: Release) -> Vec<(String, String)> {
    let cmtime = match release {
        Release::Debian(Debian::Bookworm) | Release::Ubuntu | Release::Old => OLD_CMTIME,
        Release::Debian(Debian::Trixie | Debian::TrixieBackports) => CMTIME,
        Release::Next => NEXT_CMTIME,
    };
    let pairs = PAIRS.iter().map(|(server, client, said)| {
        let both = BOTH.replace("$SERVER", server).replace("$CLIENT", client);
        let both = both.replace("$SAID", said);
        let both = both.replace("$TOO_EARLY", CALLED_TOO_EARLY);
        let name = [" -a $A", " -s $A", " $A", " $B"].iter();
        let name = name.fold((*client).to_owned(), |name, place| name.replace(place, ""));
        (name, format!("{PLACES}{both}"))
    });
    let more = [
        ("mckey, two receivers", GROUP),
        ("rping, several NICs each", SEVERAL),
        ("cmtime", cmtime),
        ("rstream -T a", POLLED),
        ("rcopy", RCOPY),
        ("channels that end under a thread", CHANNELS),
    ];
    let more = more.map(|(name, script)| (name.to_owned(), format!("{PLACES}{script}")));
    let all = pairs.chain(more).filter(|(name, _)| ends(release, name));
    all.map(|(name, script)| (format!("rdma_cm: {name}"), script)).collect()
}
