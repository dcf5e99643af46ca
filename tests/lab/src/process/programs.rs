//! perftest and the examples of libibverbs: both ends in one container, each with a NIC of its own;
//! and programs of ours for what those do not do: `fork`, memory that is not shared, and the heap.
//!
//! The container's programs have the shared heap. A good part of them is run again with
//! `VHOST_RDMA_PRIVATE=1`, which makes all of their memory private: each operation, both kinds of
//! completion queues, events, shared receive queues, all sizes.

/// The server is there when its port is, which the client tries again and again.
const BOTH: &str = r#"$SERVER > /tmp/server 2>&1 & server=$!
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
  sleep 0.2
  if $CLIENT > /tmp/client 2>&1; then wait $server && exit 0; break; fi
  kill -0 $server 2> /dev/null || break
done
(echo "server:"; cat /tmp/server; echo "client:"; cat /tmp/client) >&2; exit 1
"#;

/// Programs of perftest, with the devices that they are to use. Not: raw_ethernet_*, which send
/// frames of their own making. What takes connections by rdma_cm (`-R`) is in `connections`.
const PERFTEST: &[&str] = &[
    "ib_write_bw",
    "ib_write_bw -b -q 4",
    "ib_write_bw -c UC",
    "ib_write_bw -a",
    "ib_write_lat",
    "ib_write_lat -c UC",
    "ib_read_bw",
    "ib_read_lat",
    "ib_send_bw",
    "ib_send_bw -c UC",
    "ib_send_bw -c UD",
    "ib_send_bw -e",
    "ib_send_bw -q 4 --use-srq",
    "ib_send_lat",
    "ib_send_lat -c UC",
    "ib_send_lat -c UD",
    "ib_send_lat -e",
    "ib_send_lat -I 64",
    "ib_atomic_bw",
    "ib_atomic_bw -A CMP_AND_SWAP",
    "ib_atomic_lat",
    "ib_atomic_lat -A CMP_AND_SWAP",
];

/// Pingpongs of libibverbs' examples; `-c` compares what arrived. The largest lies in several of
/// the parts that a heap is given in. The other examples are in [`EXAMPLES`].
const PINGPONGS: &[&str] = &[
    "ibv_rc_pingpong -c",
    "ibv_rc_pingpong -c -s 134217728 -n 1",
    "ibv_rc_pingpong -c -e",
    "ibv_rc_pingpong -c -t",
    "ibv_rc_pingpong -c -N",
    "ibv_uc_pingpong -c",
    "ibv_ud_pingpong -c -s 1024",
    "ibv_srq_pingpong -c",
    "ibv_srq_pingpong -c -e",
];

/// Of both, what is run with memory that is not shared.
const PRIVATE: &[&str] = &[
    "ib_write_bw",
    "ib_write_bw -b -q 4",
    "ib_write_bw -c UC",
    "ib_write_lat",
    "ib_read_bw",
    "ib_read_lat",
    "ib_send_bw -a",
    "ib_send_bw -c UD",
    "ib_send_bw -q 4 --use-srq",
    "ib_send_lat -e",
    "ib_send_lat -I 64",
    "ib_atomic_bw",
    "ib_atomic_lat -A CMP_AND_SWAP",
    "ibv_rc_pingpong -c -e",
    "ibv_rc_pingpong -c -N",
    "ibv_uc_pingpong -c",
    "ibv_ud_pingpong -c -s 1024",
    "ibv_srq_pingpong -c",
];

/// What both ends are told beside that.
fn ends(program: &str) -> [String; 2] {
    let common = if program.starts_with("ibv_") { "-g 0" } else { "-F -x 0" };
    let times = match program {
        // Of two numbers the last counts.
        _ if program.contains(" -n ") => "",
        // All sizes take their time as it is.
        _ if program.ends_with(" -a") => " -n 100",
        _ => " -n 500",
    };
    let common = format!("{common}{times}");
    let end = |n: u32, peer: &str| format!("timeout 60 {program} {common} -d vhost_rdma{n}{peer}");
    [end(0, ""), end(1, " 127.0.0.1")]
}

/// The examples that are no pingpongs, and the one that cannot work: ibv_xsrq_pingpong is for XRC,
/// which the device does not have, and has to say so.
const EXAMPLES: [(&str, &str); 3] = [
    ("ibv_devices, ibv_devinfo", LISTED),
    ("ibv_asyncwatch", WATCHED),
    ("ibv_xsrq_pingpong is refused", XSRQ),
];
/// One lists the devices that the other describes.
const LISTED: &str = r#"ibv_devices > /tmp/devices; ibv_devinfo -v > /tmp/described
for n in 0 1; do
  ibv_devinfo -d vhost_rdma$n > /tmp/one; grep -q 'state:.*PORT_ACTIVE' /tmp/one
  guid=$(sed -n 's/^[[:space:]]*node_guid:[[:space:]]*//p' /tmp/one)
  grep -q "node_guid:.*$guid" /tmp/described
  grep -qE "^ *vhost_rdma$n[[:space:]]+$(echo $guid | tr -d :)\$" /tmp/devices
done
[ "$(grep -c vhost_rdma /tmp/devices)" = 2 ]
"#;
/// It is told that the device is gone: `IBV_EVENT_DEVICE_FATAL`, 8.
const WATCHED: &str = r#"timeout 30 stdbuf -oL ibv_asyncwatch -d vhost_rdma1 > /tmp/watched 2>&1 &
it=$!
for i in 1 2 3 4 5 6 7 8 9; do sleep 0.2; grep -q 'async event FD' /tmp/watched && break; done
grep -q '^vhost_rdma1: async event FD' /tmp/watched && ! grep -q event_type /tmp/watched
$KILL
for i in 1 2 3 4 5 6 7 8 9; do sleep 0.5; grep -q 'event_type .* (8)' /tmp/watched && break; done
kill $it; grep -q '^ *event_type .* (8), port' /tmp/watched || { cat /tmp/watched >&2; exit 1; }
"#;
const XSRQ: &str = r#"! timeout 20 ibv_xsrq_pingpong -d vhost_rdma0 -g 0 > /tmp/said 2>&1 || exit 1
grep -q XRC /tmp/said || { cat /tmp/said >&2; exit 1; }
"#;

/// Programs of ours, each with what comes before it in the script; `fork` is a parent and its
/// children, each with devices of its own.
const OURS: [(&str, &str, &str); 11] = [
    ("fork", "", "timeout 60 python3 /host/fork.py vhost_rdma0"),
    ("loaded and unloaded again", "", "timeout 60 python3 /host/reloads.py"),
    ("calls that answer as a kernel's", "", CALLS),
    ("the shared heap", "", "timeout 100 /host/process-heap"),
    ("what NCCL looks for", "", "timeout 60 python3 /host/nccl-looks.py"),
    ("memory that is not shared", "", MEMORY),
    ("memory that is not shared, no shared heap", "unset LD_PRELOAD", MEMORY),
    ("memory that is not shared, all", "export VHOST_RDMA_PRIVATE=1", MEMORY),
    ("memory that hangs, beside a program that works", "", HANGS),
    ("asleep when the device goes", "", ASLEEP),
    ("connections when the device is back", "", RETURNS),
];
/// A program that sleeps while the device goes.
const ASLEEP: &str = r#"/host/process-private vhost_rdma0 vhost_rdma1 asleep > /tmp/asleep & it=$!
for i in 1 2 3 4 5 6 7 8 9; do sleep 0.2; grep -q asleep /tmp/asleep && break; done
$KILL
timeout 20 tail --pid=$it -f /dev/null
wait $it || { cat /tmp/asleep >&2; exit 1; }
"#;
/// Memory that is freed is not what it was: a context that is gone is nobody's to use.
const RETURNS: &str = r#"unset LD_PRELOAD; export MALLOC_PERTURB_=165
/host/process-calls vhost_rdma0 returns > /tmp/returns 2>&1 & it=$!
for i in 1 2 3 4 5 6 7 8 9; do sleep 0.2; grep -q listening /tmp/returns && break; done
$KILL
wait $it || { cat /tmp/returns >&2; exit 1; }
"#;
/// The network's process is killed: the one whose forefather is the run that this script is of.
const KILL: &str = r#"parent() { sed -n 's/^PPid:[[:space:]]*//p' /proc/$1/status 2> /dev/null; }
says() { tr '\0' ' ' < /proc/$1/cmdline 2> /dev/null; }
run=$$
while [ "$run" != 1 ]; do
  case "$(says $run)" in *" run --nics "*) break;; esac
  run=$(parent $run)
done
# Of no other run may a process be touched.
[ "$run" != 1 ]
for p in $(cd /proc; echo [0-9]*); do
  case "$(says $p)" in *network-process*) ;; *) continue;; esac
  up=$p; while [ "${up:-1}" -gt 1 ] && [ "$up" != "$run" ]; do up=$(parent $up); done
  [ "$up" = "$run" ] && kill -9 $p && echo killed >> /tmp/killed
done
[ -s /tmp/killed ]
"#;
/// A page fault that nobody serves (userfaultfd) in one process; the other's round trips go on
/// meanwhile. Of 100 the slowest but one takes at most twice as long as alone, and 20 ms: both ends
/// and the device poll, and have no cores of their own, so that one often waits for another's time
/// slice. What the device itself adds is a row of the isolation benchmark (`process_hangs`).
const HANGS: &str = r#"trips() {
  timeout 30 ib_write_lat -F -x 0 -n 5000 -d vhost_rdma0 > /tmp/server 2>&1 &
  sleep 1; timeout 30 ib_write_lat -F -x 0 -n 5000 -d vhost_rdma1 127.0.0.1 > /tmp/client
  wait; awk '$1 == 2 { print int($8) }' /tmp/client
}
alone=$(trips); [ -n "$alone" ]
/host/process-private vhost_rdma0 vhost_rdma1 hangs > /tmp/hangs & hangs=$!
for i in 1 2 3 4 5 6 7 8 9; do sleep 0.2; grep -q hanging /tmp/hangs && break; done
beside=$(trips); [ -n "$beside" ]
grep -q '^hanging' /tmp/hangs && ! grep -q ok /tmp/hangs
echo "99 of 100 took $alone us alone, $beside us beside it" >&2
[ "$beside" -le $((2 * alone + 20000)) ]
wait $hangs || { cat /tmp/hangs >&2; exit 1; }
"#;
const CALLS: &str = "timeout 160 /host/process-calls vhost_rdma0 > /tmp/cases 2> /tmp/why ||
  { grep -v '^ok' /tmp/cases >&2; cat /tmp/why >&2; exit 1; }";
const MEMORY: &str = "timeout 160 /host/process-private vhost_rdma0 vhost_rdma1 \
  > /tmp/cases 2>&1 || { grep -v '^ok' /tmp/cases >&2; exit 1; }";

/// Names, and scripts.
pub(super) fn all() -> Vec<(String, String)> {
    let both = |program: &str| {
        let [server, client] = ends(program);
        BOTH.replace("$SERVER", &server).replace("$CLIENT", &client)
    };
    let theirs = PERFTEST.iter().chain(PINGPONGS).map(|it| ((*it).to_owned(), both(it)));
    let private = PRIVATE.iter().map(|program| {
        let script = format!("export VHOST_RDMA_PRIVATE=1\n{}", both(program));
        (format!("private: {program}"), script)
    });
    let examples = EXAMPLES.iter().map(|(name, it)| ((*name).into(), it.replace("$KILL", KILL)));
    let ours = OURS.iter().map(|(name, before, it)| {
        ((*name).into(), format!("{before}\n{}", it.replace("$KILL", KILL)))
    });
    theirs.chain(private).chain(examples).chain(ours).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_have_a_device_of_their_own() {
        let [server, client] = ends("ib_send_lat -e");
        assert_eq!(server, "timeout 60 ib_send_lat -e -F -x 0 -n 500 -d vhost_rdma0");
        assert_eq!(client, "timeout 60 ib_send_lat -e -F -x 0 -n 500 -d vhost_rdma1 127.0.0.1");
    }

    #[test]
    fn what_a_program_says_of_how_often_counts() {
        let [server, _] = ends("ibv_rc_pingpong -c -s 134217728 -n 1");
        assert_eq!(server, "timeout 60 ibv_rc_pingpong -c -s 134217728 -n 1 -g 0 -d vhost_rdma0");
        let times = |program: &&str| ends(program)[0].matches(" -n ").count();
        assert!(PERFTEST.iter().chain(PINGPONGS).chain(PRIVATE).all(|it| times(it) == 1));
    }
}
