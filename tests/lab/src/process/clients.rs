//! What stands above libibverbs: UCX, Open MPI, libfabric, and the files that they look for.
//!
//! Both ranks of Open MPI are in one container, with TCP and shared memory of UCX switched off.

use super::release::Release;

/// Each test of the batch has to print its line.
const UCX: &str = r#"export UCX_LOG_LEVEL=fatal UCX_TLS=$TLS
# Of those that are built with MPI, it wants to be told that this is none.
p=$(ucx_perftest -h 2>&1 | grep -q -- ' -P ' && echo '-P 0' || true)
UCX_NET_DEVICES=vhost_rdma0:1 timeout 60 ucx_perftest $p -f -b /host/ucx.batch > /tmp/server 2>&1 &
for i in 1 2 3 4 5 6 7 8 9 10; do
  sleep 0.3; grep -qi ':3419 [0-9A-F:]* 0A ' /proc/net/tcp* && break
done
export UCX_NET_DEVICES=vhost_rdma1:1
timeout 60 ucx_perftest $p -f -b /host/ucx.batch 127.0.0.1 > /tmp/client 2>&1 ||
  { cat /tmp/server /tmp/client >&2; exit 1; }
for t in tag_lat tag put get am cswap; do
  grep -q "^ *$t  *[0-9]" /tmp/client || { (echo "no $t"; cat /tmp/client) >&2; exit 1; }
done
"#;

const MPI: &str = r#"export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
timeout 100 mpirun -n 2 --oversubscribe $HOW \
  python3 /host/$CHECK > /tmp/mpi 2>&1 ||
  { tail -n 30 /tmp/mpi >&2; exit 1; }
grep -q '^ok $LAST' /tmp/mpi || { tail -n 30 /tmp/mpi >&2; exit 1; }
"#;

/// A check of Open MPI, and what it says last.
pub(super) type Check<'a> = (&'a str, &'a str);

fn mpi(how: &str, (check, last): Check<'_>) -> String {
    MPI.replace("$HOW", how).replace("$CHECK", check).replace("$LAST", last)
}

pub(super) fn mpi_over_ucx(check: Check<'_>) -> String {
    let how = mpi("--mca pml ucx --mca osc ucx", check);
    format!("export UCX_TLS=rc_v,ud_v,self UCX_LOG_LEVEL=fatal\n{how}")
}

/// Connections by rdma_cm. The ends agree over TCP under the device's own address, and `-c`
/// compares what arrived.
///
/// Each end says "fin" last, waits for the other's, and goes. The other's rxm may hear of that end
/// before it has looked at its completions, and closes the connection with "fin" in it; then its
/// program waits for ever, or is told that its own "fin" was flushed: which libfabric says of what
/// it has not looked at (verbs_ep.c, vrb_flush_sq()). That is libfabric's race (rxm_conn.c,
/// rxm_process_shutdown(); pull request 5228 of ofiwg/libfabric), found where processors are
/// scarce: one time in ten beside a compiler. All messages had arrived by then, and both meet once
/// more.
const LIBFABRIC: &str = r#"address=$(ibv_devinfo -v -d vhost_rdma0 |
  sed -n 's/.*::ffff:\([0-9.]*\),.*/\1/p')
ip address add $address/32 dev lo
export FI_LOG_LEVEL=info FI_LOG_PROV=ofi_rxm
meet() {
  ping="timeout 15 fi_pingpong $KIND -c -I 100 -S 65536"
  $ping > /tmp/server 2>&1 & server=$!
  for i in 1 2 3 4 5 6 7 8 9 10; do
    sleep 0.3; grep -qi ':B9E8 [0-9A-F:]* 0A ' /proc/net/tcp* && break
  done
  $ping $address > /tmp/client 2>&1 && client=0 || client=$?
  wait $server && served=0 || served=$?
}
all_came() { grep -q '^64k *100 *=100' /tmp/server && grep -q '^64k *100 *=100' /tmp/client; }
for meeting in 1 2 3 4 5 6; do
  meet
  all_came || break
  [ $client.$served = 0.0 ] && exit 0
  # One of them was too late, by its limit of time or by what it was told.
  case $client.$served in
    0.124|0.125) late=/tmp/server;;
    124.0|125.0) late=/tmp/client;;
    *) break;;
  esac
  grep -q 'rxm_process_shutdown' $late || break
  case $client.$served in *125*) grep -q 'cq_readerr: Work Request Flushed' $late || break;; esac
done
cat /tmp/server /tmp/client >&2; exit 1
"#;

/// What a kernel's driver would have there; other paths are as they are.
const FILES: &str = "test -c /dev/infiniband/vhost_rdma0
test -r /dev/infiniband/vhost_rdma0 && test -w /dev/infiniband/vhost_rdma0
test -r /sys/class/infiniband/vhost_rdma0/node_type
! test -r /sys/class/infiniband/vhost_rdma0/nothing
[ \"$(cat /sys/class/infiniband/vhost_rdma0/ports/1/gid_attrs/types/0)\" = 'RoCE v2' ]
[ \"$(cat /sys/class/infiniband/vhost_rdma0/ports/1/gid_attrs/ndevs/0)\" = lo ]
! test -e /dev/infiniband/uverbs0
! test -e /sys/class/infiniband/mlx5_0/node_type
! test -w /sys/class/infiniband/vhost_rdma0/node_type
[ \"$(head -c 4 /proc/version)\" = Linu ]
";

/// Names, and scripts, for what a release has. The UCX of Debian's next (1.23) is built without
/// verbs, and so is what stands above it.
pub(super) fn all(release: Release) -> Vec<(String, String)> {
    let ucx =
        |name: &str, tls: &str| (format!("ucx_perftest over {name}"), UCX.replace("$TLS", tls));
    let mpi = |name: &str, check| (format!("open mpi over ucx: {name}"), mpi_over_ucx(check));
    let fabric = |name: &str, kind: &str| {
        (format!("libfabric over verbs: {name}"), LIBFABRIC.replace("$KIND", kind))
    };
    let mut all = vec![
        ("files of a device".into(), FILES.into()),
        ucx("rc_verbs", "rc_v"),
        ucx("ud_verbs", "ud_v"),
        mpi("messages, collectives, one-sided", ("mpi-check.py messages windows", "windows")),
        mpi("training of a network", ("mpi-train.py", "training")),
        fabric("messages", "-p verbs -e msg"),
        fabric("reliable datagrams", "-p verbs;ofi_rxm -e rdm"),
    ];
    all.retain(|(name, _)| release != Release::Next || !name.contains("ucx"));
    all
}
