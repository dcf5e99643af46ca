//! perftest and the examples of libibverbs: both ends in one container, each with a NIC of its own.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::container::Container;
use super::row;
use crate::rows::Row;

const WAIT: Duration = Duration::from_secs(120);
/// The server is there when its port is, which the client tries again and again.
const BOTH: &str = r#"$SERVER > /tmp/server 2>&1 & server=$!
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
  sleep 0.2
  if $CLIENT > /tmp/client 2>&1; then wait $server && exit 0; break; fi
  kill -0 $server 2> /dev/null || break
done
echo "server:"; cat /tmp/server; echo "client:"; cat /tmp/client; exit 1
"#;

/// Programs of perftest, with the devices that they are to use. Not: raw_ethernet_*, which send
/// frames of their own making, and what takes connections by rdma_cm (`-R`).
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

/// Examples of libibverbs; `-c` compares what arrived. Not: ibv_xsrq_pingpong, whose XRC the device
/// does not have.
const PINGPONGS: &[&str] = &[
    "ibv_rc_pingpong -c",
    "ibv_rc_pingpong -c -e",
    "ibv_rc_pingpong -c -t",
    "ibv_rc_pingpong -c -N",
    "ibv_uc_pingpong -c",
    "ibv_ud_pingpong -c -s 1024",
    "ibv_srq_pingpong -c",
    "ibv_srq_pingpong -c -e",
];

/// What both ends are told beside that.
fn ends(program: &str) -> [String; 2] {
    let common = if program.starts_with("ibv_") { "-g 0 -n 500" } else { "-F -x 0 -n 500" };
    // All sizes take their time as it is.
    let common = if program.ends_with(" -a") { "-F -x 0 -n 100" } else { common };
    let end = |n: u32, peer: &str| format!("timeout 60 {program} {common} -d vhost_rdma{n}{peer}");
    [end(0, ""), end(1, " 127.0.0.1")]
}

/// A parent and its children, each with devices of its own.
const FORK: &str = include_str!("../../../guest-programs/process-fork.py");

/// Runs those whose name has `only` in it.
pub(super) fn run(container: &Container, only: Option<&str>) -> Result<Vec<Row>> {
    fs::write(container.share().join("fork.py"), FORK)?;
    let both = |program: &&str| {
        let [server, client] = ends(program);
        ((*program).to_owned(), BOTH.replace("$SERVER", &server).replace("$CLIENT", &client))
    };
    let fork = ("fork".to_owned(), "timeout 60 python3 /host/fork.py vhost_rdma0".to_owned());
    let all = PERFTEST.iter().chain(PINGPONGS).map(both).chain([fork]);
    let mut rows = Vec::new();
    for (program, script) in all {
        if only.is_some_and(|part| !program.contains(part)) {
            continue;
        }
        let begin = Instant::now();
        let done = container.run(2, &script, WAIT);
        let name = format!("{}: {program}", container.debian.name());
        match &done {
            Ok(_) => eprintln!("    {name}: ok"),
            Err(error) => eprintln!("    {name}: {error:#}"),
        }
        rows.push(row(name, done.is_ok(), begin.elapsed().as_secs_f64()));
    }
    Ok(rows)
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
}
