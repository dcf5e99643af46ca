//! Clients of other kinds, each chosen for what it uses of the device.
//!
//! - mckey, multicast: join, attach, datagrams to a group
//! - rstream, riostream, rcopy (rsockets): RDMA writes with immediate, inline, completion events
//!   under poll()
//! - cmtime, the connection manager under load: hundreds of datagrams of QP 1, QPs made and moved
//!   in number
//! - RDS, kernel verbs: long-lived RC connections with their own flow control, receives refilled
//!   from completions
//! - SMC-R version 2, kernel verbs: RDMA writes into a ring of the peer's, with immediates as news,
//!   through sockets that think they are TCP's
//! - NFS over RDMA, kernel verbs: read and write chunks by fast registration, remote invalidation,
//!   a server that pulls and pushes
//! - libfabric, msg and rdm end points: connection manager events; a shared receive queue and many
//!   small buffers under ofi_rxm
//!
//! Every client compares what arrives with what was sent, and the NICs' counters must show the
//! bytes: RDS and SMC would else be free to go over TCP.

use super::super::client::{Client, LISTENS, Ready};

pub(super) const CLIENTS: &[Client] = &[
    Client {
        name: "mckey: multicast",
        server: "stdbuf -oL mckey -m 239.9.0.1 -b 10.9.0.2 -C 50 -S 1000",
        ready: Ready::Says("joined dgid"),
        client: "mckey -m 239.9.0.1 -b 10.9.0.1 -s -C 50 -S 1000",
        bytes: 50 * 1000,
    },
    Client {
        name: "rstream, verified",
        server: "rstream -b 10.9.0.2 -S 65536 -I 100 -C 1 -T v",
        ready: LISTENS,
        client: "rstream -s 10.9.0.2 -S 65536 -I 100 -C 1 -T v",
        bytes: 100 * 65536,
    },
    Client {
        name: "rstream, blocking, small",
        server: "rstream -b 10.9.0.2 -S 64 -I 500 -C 1 -T b",
        ready: LISTENS,
        client: "rstream -s 10.9.0.2 -S 64 -I 500 -C 1 -T b",
        bytes: 500 * 64,
    },
    Client {
        name: "riostream, verified",
        server: "riostream -b 10.9.0.2 -S 65536 -I 100 -C 1 -T v",
        ready: LISTENS,
        client: "riostream -s 10.9.0.2 -S 65536 -I 100 -C 1 -T v",
        bytes: 100 * 65536,
    },
    Client {
        name: "rcopy: a file",
        server: "cd /tmp; rm -f copy; timeout 60 rcopy & n=0
                 until [ -s copy ] && [ $(stat -c %s copy) = 8388608 ] && \
                     [ -e /host/client.done ]; do
                   sleep 0.2; n=$((n+1)); [ $n -lt 300 ] || exit 1
                 done
                 kill %1 2>/dev/null; sha256sum < copy",
        ready: LISTENS,
        client: "dd if=/dev/urandom of=/tmp/original bs=1M count=8 2>/dev/null
                 rcopy /tmp/original 10.9.0.2:copy && sha256sum < /tmp/original",
        bytes: 8 << 20,
    },
    Client {
        name: "cmtime: 200 connections at once, with QPs and without",
        server: "stdbuf -oL cmtime -c 200",
        ready: LISTENS,
        client: "sleep 1; stdbuf -oL cmtime -s 10.9.0.2 -c 200",
        // What carries a connection: REQ, REP, RTU, DREQ, DREP of 256 bytes each, twice 200 times.
        bytes: 2 * 200 * 2 * 256,
    },
    Client {
        name: "RDS",
        server: "modprobe -a rds rds_rdma; exec python3 -u /host/rds-echo.py serve 10.9.0.2 200",
        ready: Ready::Says("ready"),
        client: "modprobe -a rds rds_rdma; \
                 exec python3 /host/rds-echo.py ask 10.9.0.1 10.9.0.2 200",
        bytes: 200 / 8 * 100_000,
    },
    Client {
        name: "SMC-R version 2",
        server: "modprobe smc; exec python3 -u /host/smc-echo.py serve 10.9.0.2",
        ready: Ready::Says("ready"),
        client: "modprobe smc; exec python3 /host/smc-echo.py ask 10.9.0.2",
        bytes: 2 * 3 * (1 << 20),
    },
    Client {
        name: "NFS over RDMA",
        server: NFS_SERVER,
        ready: Ready::Says("exported"),
        client: NFS_CLIENT,
        bytes: 3 * (16 << 20),
    },
    Client {
        name: "libfabric over verbs: messages",
        server: "fi_pingpong -p verbs -e msg -c -I 100 -S 65536",
        ready: LISTENS_TCP,
        client: "fi_pingpong -p verbs -e msg -c -I 100 -S 65536 10.9.0.2",
        bytes: 100 * 65536,
    },
    Client {
        name: "libfabric over verbs: datagrams",
        server: "fi_pingpong -p 'verbs;ofi_rxm' -e rdm -c -I 100 -S 65536",
        ready: LISTENS_TCP,
        client: "fi_pingpong -p 'verbs;ofi_rxm' -e rdm -c -I 100 -S 65536 10.9.0.2",
        bytes: 100 * 65536,
    },
];

/// fi_pingpong's ends agree over TCP, on port 47592.
const LISTENS_TCP: Ready =
    Ready::When("grep -qi ':B9E8 [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6");

/// NFS 4 only: no portmapper, and no grace period, in which nobody could open anything.
const NFS_SERVER: &str = "set -e
modprobe -a nfsd rpcrdma
mkdir -p /srv/lab /var/lib/nfs/v4recovery
mountpoint -q /srv/lab || mount -t tmpfs -o size=96m tmpfs /srv/lab
mountpoint -q /proc/fs/nfsd || mount -t nfsd nfsd /proc/fs/nfsd
echo '/srv/lab 10.9.0.0/24(rw,no_root_squash,insecure,no_subtree_check,fsid=0)' > /etc/exports
rpc.mountd -N 3 -F & mountd=$!
exportfs -r
rpc.nfsd -N 3 --rdma=20049 2
echo Y > /proc/fs/nfsd/v4_end_grace
echo exported
n=0
until [ -e /host/client.done ]; do sleep 0.2; n=$((n+1)); [ $n -lt 600 ] || exit 1; done
rpc.nfsd 0
exportfs -ua
kill $mountd
umount /srv/lab
";

/// What is written is read back through a new mount, whose cache is empty; then fio, past the
/// cache.
const NFS_CLIENT: &str = "set -e
modprobe rpcrdma
mkdir -p /tmp/n
nfs='mount -t nfs -o vers=4.2,proto=rdma,port=20049,sec=sys,soft,timeo=100,retry=0 10.9.0.2:/ \
    /tmp/n'
$nfs
grep ' /tmp/n ' /proc/mounts | grep proto=rdma
dd if=/dev/urandom of=/tmp/original bs=1M count=16 2>/dev/null
cp /tmp/original /tmp/n/file
umount /tmp/n
$nfs
cmp /tmp/original /tmp/n/file
fio --name=nfs --directory=/tmp/n --rw=randwrite --bs=16k --size=8m --direct=1 --verify=crc32c \
    --output-format=terse --output=/tmp/fio.out || { cat /tmp/fio.out; exit 1; }
mkdir /tmp/n/dir
cp -r /usr/share/doc/rdma-core /tmp/n/dir/
diff -r /usr/share/doc/rdma-core /tmp/n/dir/rdma-core
umount /tmp/n
";
