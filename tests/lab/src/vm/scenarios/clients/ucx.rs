//! UCX by its own benchmark, as Debian ships it.
//!
//! `ud_verbs` takes a datagram's service level for what ConnectX writes there, the kind of network
//! header (docs/virtio-rdma.md, DEV-CQ-4); without it no UCX connection over UD comes about, and
//! those of `rc_verbs` neither, which UD sets up. UCX writes an error for each remote flush, which
//! its `rc_verbs` has for some devices only; what asks for one does without.

use super::super::client::{Client, Ready};

/// A test per line: its name, and its options for `ucx_perftest`.
pub(crate) const BATCH: &str = "\
tag_lat -t tag_lat -s 8 -n 200 -w 10
tag -t tag_bw -s 65536 -n 50 -w 5
put -t ucp_put_bw -s 65536 -n 50 -w 5
get -t ucp_get -s 65536 -n 50 -w 5
am -t ucp_am_bw -s 65536 -n 50 -w 5
cswap -t ucp_cswap -s 8 -n 50 -w 5
";

/// Tag, put, get and active messages of 64 KiB, 50 times each; by default UCX may give a few of
/// the pieces to TCP.
const BYTES: u64 = 4 * 45 * 65536;

/// UCX's own port.
const LISTENS_TCP: Ready =
    Ready::When("grep -qi ':3419 [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6");

const fn perftest(name: &'static str, server: &'static str, client: &'static str) -> Client {
    Client { name, server, ready: LISTENS_TCP, client, bytes: BYTES }
}

macro_rules! perftest {
    ($name:literal, $settings:literal) => {
        perftest(
            $name,
            concat!("UCX_LOG_LEVEL=fatal ", $settings, " ucx_perftest -P 0 -f -b /host/ucx.batch"),
            concat!(
                "UCX_LOG_LEVEL=fatal ",
                $settings,
                " timeout 120 ucx_perftest -P 0 -f -b /host/ucx.batch 10.9.0.2 > /tmp/ucx || exit 1
                 cat /tmp/ucx
                 for t in tag_lat tag put get am cswap; do
                   grep -q \"^ *$t  *[0-9]\" /tmp/ucx || { echo no $t; exit 1; }
                 done"
            ),
        )
    };
}

pub(super) const CLIENTS: &[Client] = &[
    perftest!("ucx_perftest, default settings", ""),
    perftest!("ucx_perftest over rc_verbs", "UCX_TLS=rc_v"),
    perftest!("ucx_perftest over ud_verbs", "UCX_TLS=ud_v"),
];
