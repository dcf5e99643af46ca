//! libfabric's own tests (see `fabtests`), with their checks of data where they have some (`-v`).
//!
//! The server names its address: without one libfabric's verbs provider listens on none.

use super::super::client::{Client, LISTENS};

macro_rules! fabtest {
    ($name:literal, $command:literal, $bytes:expr) => {
        Client {
            name: $name,
            server: concat!("timeout 200 ", $command, " -s 10.9.0.2"),
            ready: LISTENS,
            client: concat!("timeout 120 ", $command, " 10.9.0.2"),
            bytes: $bytes,
        }
    };
}

const KIB64: u64 = 65536;

pub(super) const CLIENTS: &[Client] = &[
    fabtest!("fabtests msg_pingpong", "fi_msg_pingpong -p verbs -v -I 50 -S 65536", 50 * KIB64),
    fabtest!(
        "fabtests rdm_pingpong",
        "fi_rdm_pingpong -p 'verbs;ofi_rxm' -v -I 50 -S 65536",
        50 * KIB64
    ),
    fabtest!(
        "fabtests rdm_tagged_pingpong",
        "fi_rdm_tagged_pingpong -p 'verbs;ofi_rxm' -v -I 50 -S 65536",
        50 * KIB64
    ),
    fabtest!(
        "fabtests rma_pingpong: write with data",
        "fi_rma_pingpong -p 'verbs;ofi_rxm' -e rdm -o writedata -v -I 50 -S 65536",
        50 * KIB64
    ),
    fabtest!("fabtests rdm", "fi_rdm -p 'verbs;ofi_rxm'", 64),
    fabtest!("fabtests cq_data", "fi_cq_data -p verbs -e msg", 64),
    fabtest!(
        "fabtests rdm_atomic",
        "fi_rdm_atomic -p 'verbs;ofi_rxm' -o all -z uint64 -v -S 8 -I 5",
        64
    ),
];
