//! Open MPI, started by its own `mpirun`, one rank in each guest.
//!
//! Debian switches off what would use a network faster than TCP, in
//! `/etc/openmpi/openmpi-mca-params.conf`: `pml = ^ucx`, `osc = ^ucx,pt2pt`, `mtl = ^ofi`,
//! `btl = ^uct,openib,ofi`. So each row names what it wants.
//!
//! Over libfabric there are messages and collectives, no one-sided communication: of Open MPI's
//! components for windows, `osc/ucx` is UCX, `osc/sm` is for one machine, and `osc/rdma` wants a
//! BTL with RDMA, of which `btl/ofi` does not take `verbs;ofi_rxm`. `MPI_Win_allocate` and
//! `MPI_Win_create` then end with `MPI_ERR_WIN`, on any device. Windows are UCX's, in a row below.
//!
//! libfabric caches registrations and learns that memory went back to the kernel by a hook in
//! `brk`. UCX, which Open MPI opens as well, puts a hook of its own into `sbrk`, which makes the
//! system call itself. Then the cache hears nothing: memory that malloc gave back and took again
//! stays registered with its old pages, and what arrives for it is lost. libfabric's pull request
//! 12850 mends it. Until then UCX is told to have no hooks (`UCX_MEM_EVENTS=n`); the cache is on.

use super::super::client::{Client, Ready};

/// `sh /host/mpi.sh OPTIONS PROGRAM`: one rank here, one in guest b. mpirun wants names for both,
/// and its agent in both (a daemon that finds none ends with SIGSEGV).
pub(super) const LAUNCH: &str = r#"
grep -q '10.9.0.2 b' /etc/hosts || printf '10.9.0.1 a\n10.9.0.2 b\n' >> /etc/hosts
printf '#!/bin/sh\nexec python3 /host/lab-rsh.py "$@"\n' > /tmp/rsh
chmod +x /tmp/rsh
[ $# -gt 0 ] || exit 0
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec timeout 200 mpirun --prtemca plm_ssh_agent /tmp/rsh --host a:1,b:1 --map-by node -n 2 "$@"
"#;

/// The shell that mpirun starts the other rank with.
const SERVER: &str = "sh /host/mpi.sh
python3 /host/lab-rsh.py serve 10.9.0.2 & shell=$!
n=0; until [ -e /host/client.done ]; do sleep 0.2; n=$((n+1)); [ $n -lt 1200 ] || exit 1; done
kill $shell
";
const READY: Ready = Ready::Says("ready");

/// Messages of up to 1 MiB there and back, three times each.
const MESSAGES: u64 = 2 * 3 * (1 << 20);
/// Gradients of 1601 numbers, 40 times.
const GRADIENTS: u64 = 40 * 1601 * 8;
/// A window of 32 KiB is put, got and accumulated by both, twice.
const WINDOWS: u64 = 2 * 3 * 2 * 32768;

pub(super) const CLIENTS: &[Client] = &[
    Client {
        name: "open mpi over ucx: messages, collectives, one-sided",
        server: SERVER,
        ready: READY,
        client: "sh /host/mpi.sh -x UCX_LOG_LEVEL=fatal --mca pml ucx --mca osc ucx \
                 python3 /host/mpi-check.py messages windows > /tmp/mpi 2>&1; status=$?
                 tail -n 30 /tmp/mpi; grep -q 'ok windows' /tmp/mpi || exit 1; exit $status",
        bytes: MESSAGES + WINDOWS,
    },
    Client {
        name: "open mpi over libfabric: messages, collectives",
        server: SERVER,
        ready: READY,
        client: "sh /host/mpi.sh -x UCX_MEM_EVENTS=n --mca pml cm --mca mtl ofi \
                 --mca mtl_ofi_provider_include 'verbs;ofi_rxm' \
                 python3 /host/mpi-check.py messages > /tmp/mpi 2>&1; status=$?
                 tail -n 30 /tmp/mpi; grep -q 'ok messages' /tmp/mpi || exit 1; exit $status",
        bytes: MESSAGES,
    },
    Client {
        name: "open mpi: training of a network, same losses as over tcp",
        server: SERVER,
        ready: READY,
        client: "sh /host/mpi.sh -x UCX_LOG_LEVEL=fatal --mca pml ucx \
                 python3 /host/mpi-train.py > /tmp/train.ucx 2>&1 || { cat /tmp/train.ucx; exit 1; }
                 sh /host/mpi.sh --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include eth0 \
                 python3 /host/mpi-train.py > /tmp/train.tcp 2>&1 || { cat /tmp/train.tcp; exit 1; }
                 for r in ucx tcp; do grep -E '^(loss|ok) ' /tmp/train.$r > /tmp/losses.$r; done
                 [ $(wc -l < /tmp/losses.ucx) = 41 ] && cmp /tmp/losses.ucx /tmp/losses.tcp || \
                     exit 1
                 tail -n 2 /tmp/losses.ucx",
        bytes: GRADIENTS,
    },
];
