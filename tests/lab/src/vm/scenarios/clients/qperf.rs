//! qperf, with its connections made by the connection manager: it fills in no GRH itself, so its
//! UC and UD tests, which do not use that, run on no RoCE device.

use super::super::client::{Client, Ready};

const SERVER: &str = "qperf & server=$!
n=0; until [ -e /host/client.done ]; do sleep 0.2; n=$((n+1)); [ $n -lt 1200 ] || exit 1; done
kill $server; true
";

/// qperf's port is 19765.
const LISTENS_TCP: Ready =
    Ready::When("grep -qi ':4D35 [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6");

macro_rules! qperf {
    ($name:literal, $tests:literal, $bytes:expr) => {
        Client {
            name: $name,
            server: SERVER,
            ready: LISTENS_TCP,
            client: concat!("timeout 120 qperf 10.9.0.2 -t 1 -cm 1 ", $tests),
            bytes: $bytes,
        }
    };
}

pub(super) const CLIENTS: &[Client] = &[
    qperf!("qperf: RC", "rc_bw rc_lat rc_rdma_read_bw rc_rdma_write_bw", 1 << 20),
    qperf!("qperf: verified atomics", "ver_rc_compare_swap ver_rc_fetch_add", 1000),
];
