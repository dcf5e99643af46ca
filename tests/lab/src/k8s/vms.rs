//! `--full`: each container runs QEMU with our guest image on the NIC that it was given; the
//! companion netdevs carry ARP and the connections of rdma_cm, and unmodified programs run between
//! the guests.
//!
//! The image is the lab's QEMU root with kernel, disk and our driver beside it. The pod is as
//! restricted as the others; the guest's memory is within the pod's limit. The command line is the
//! one that the agent put into the environment, after machine, memory and disk.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::cache::Cache;
use crate::exec::{capture, tied, wait_for};
use crate::host;
use crate::k8s::image::Image;
use crate::k8s::pods::resource;
use crate::k8s::test::Bench;
use crate::k8s::{ours, plane};
use crate::products;
use crate::roots::{self, Debian};

const IMAGE: &str = "localhost/vm:lab";
const POOL: &str = "tapped";
const COUNT: usize = 4;
const WAIT: Duration = Duration::from_secs(900);
const CONVERT_WAIT: Duration = Duration::from_secs(300);

/// `$1` the guest's name, `$2` its number, `$3` what it does. 9p's files are the pod's own
/// directory; the second serial line is the guest's command line.
const RUN: &str = r#"#!/bin/sh
set -e
mkdir -p /share/cmd /share/products
cp /vm/products/* /share/products/
cp "/vm/$3.sh" /share/cmd/1.sh
mkfifo /share/ctl.in /share/ctl.out
export TMPDIR=/share
eval "set -- \"$1\" \"$2\" \"$3\" $VHOST_RDMA_TAPPED_0_QEMU_ARGS"
name=$1 number=$2
append="console=ttyS0 quiet panic=0 mitigations=off no_timer_check"
shift 3
echo "qemu-system-x86_64 … $*"
( qemu-system-x86_64 -accel tcg,thread=multi -cpu max -nodefaults -no-user-config -display none \
  -M q35,memory-backend=mem -m 640M -object memory-backend-memfd,id=mem,size=640M,share=on \
  -kernel /vm/vmlinuz -initrd /vm/initrd.gz \
  -drive file=/vm/root.qcow2,if=virtio,format=qcow2,snapshot=on \
  -append "$append lab.name=$name lab.ip=$number" \
  -serial file:/share/console -chardev pipe,id=ctl,path=/share/ctl -serial chardev:ctl \
  -virtfs local,path=/share,mount_tag=host,security_model=none \
  -device virtio-rng-pci -global virtio-net-pci.romfile= "$@" || true
  echo done 0 1 > /share/ctl.out ) &
exec 3<> /share/ctl.out
word=
while [ "$word" != ready ] && [ "$word" != done ]; do read -r word id status <&3; done
[ "$word" = done ] || echo "run 1" > /share/ctl.in
while [ "$word" != done ]; do read -r word id status <&3; done
[ ! -e /share/cmd/1.out ] || cat /share/cmd/1.out
[ "$id" = 1 ] || cat /share/console
exit "${status:-1}"
"#;

/// Driver, provider, and the GID of the guest's address; as `vm/peers.rs` does it.
const SET_UP: &str = r#"set -e
modprobe -a ib_uverbs ib_umad rdma_ucm
cp /host/products/libvirtio_rdma-rdmav34.so /usr/lib/x86_64-linux-gnu/libibverbs/
cp /host/products/virtio_rdma.driver /etc/libibverbs.d/
insmod /host/products/virtio_rdma.ko
ulimit -l unlimited
ip=$(hostname | tr ab 12)
gid=
n=0
while [ -z "$gid" ] && [ $n -lt 300 ]; do
  for d in /sys/class/infiniband/*; do
    for g in "$d"/ports/1/gids/*; do
      case $(cat "$g" 2>/dev/null) in *:ffff:0a09:000$ip) dev=${d##*/} gid=${g##*/};; esac
    done
  done
  sleep 0.2; n=$((n+1))
done
[ -n "$gid" ] || { rdma link; ip addr; dmesg | tail; exit 1; }
ibv_devinfo | head -8
"#;

const SERVER: &str = "
ibv_rc_pingpong -c -d $dev -g $gid -n 200
rping -s -a 0.0.0.0 -v -C 20 > /dev/null
";

/// The server listens some time later or earlier.
const CLIENT: &str = "
n=0
until ping -q -c 2 -W 2 10.9.0.2; do n=$((n+1)); [ $n -lt 200 ]; done
ip neigh show 10.9.0.2
again() { n=0; until \"$@\"; do n=$((n+1)); [ $n -lt 200 ] || return 1; sleep 1; done; }
again ibv_rc_pingpong -c -d $dev -g $gid -n 200 10.9.0.2
again rping -c -a 10.9.0.2 -v -C 20
ip neigh show 10.9.0.2
";

/// A guest with a queue pair and somebody who waits at it.
const HOLD: &str = "
ibv_rc_pingpong -d $dev -g $gid > /dev/null &
touch /host/up
sleep 1000000
";

/// Makes the image and puts it into the cluster, once.
fn import(bench: &Bench<'_>, cache: &Cache) -> Result<()> {
    if bench.node.run(&["ctr", "-n", "k8s.io", "images", "ls", "-q"])?.lines().any(|i| i == IMAGE) {
        return Ok(());
    }
    let guest = roots::guest(cache, Debian::Trixie)?;
    let stage = bench.node.lab().join("vm");
    std::fs::create_dir_all(&stage)?;
    let disk = stage.join("root.qcow2");
    host::ensure_packages(cache, &["qemu-utils"])?;
    let mut cmd = tied("qemu-img");
    cmd.args(["convert", "-O", "qcow2"]).arg(guest.dir.join("root.img")).arg(&disk);
    capture(&mut cmd, CONVERT_WAIT).context("qemu-img")?;
    let mut image = Image::on_root(&roots::qemu(cache)?)
        .file(&guest.dir.join("vmlinuz"), "vm/vmlinuz")
        .file(&guest.dir.join("initrd.gz"), "vm/initrd.gz")
        .file(&disk, "vm/root.qcow2")
        .entry(&["/bin/sh", "/vm/run"]);
    let scripts = [
        ("run", RUN.to_owned()),
        ("client.sh", SET_UP.to_owned() + CLIENT),
        ("server.sh", SET_UP.to_owned() + SERVER),
        ("hold.sh", SET_UP.to_owned() + HOLD),
    ];
    for (name, text) in scripts {
        let path: PathBuf = stage.join(name);
        std::fs::write(&path, text)?;
        image = image.file(&path, &format!("vm/{name}"));
    }
    for product in products::for_guest(cache, Debian::Trixie)? {
        let name = product.file_name().and_then(|n| n.to_str()).context("a product has no name")?;
        let to = format!("vm/products/{name}");
        image = image.file(&product, &to);
    }
    image.import(bench.node, IMAGE)?;
    std::fs::remove_dir_all(stage)?;
    Ok(())
}

fn manifest(name: &str, number: &str, does: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("vm-{name}")},
        "spec": {
            "automountServiceAccountToken": false,
            "dnsPolicy": "Default",
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": true, "runAsUser": 1000, "runAsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [{
                "name": "vm", "image": IMAGE, "imagePullPolicy": "Never",
                "args": [name, number, does],
                "securityContext": {
                    "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}
                },
                "resources": {
                    "limits": {"memory": "1Gi", resource(POOL): 1}, "requests": {"cpu": "10m"}
                },
                "volumeMounts": [{"name": "share", "mountPath": "/share"}],
            }],
            "volumes": [{"name": "share", "emptyDir": {}}],
        },
    })
}

/// The daemon dies under a QEMU, whose device never connects again: its pod's ID goes Unhealthy, an
/// Event says so, and a pod of the same name gets a NIC. That this one works is [`two_vms`], whose
/// first guest it is.
pub(crate) fn daemon_killed(bench: &mut Bench<'_>) -> Result<()> {
    import(bench, bench.cache)?;
    plane::write_network(bench.node, "1.0.0", Some(ours::CHAINED))?;
    let kubectl = bench.pods.kubectl;
    bench.offered(POOL, COUNT)?;
    kubectl.create(&manifest("a", "1", "hold"))?;
    let up = wait_for("the guest to have a queue pair", WAIT, || {
        std::thread::sleep(Duration::from_secs(1));
        let pod = kubectl.pod("vm-a")?.context("the pod is gone")?;
        let phase = pod.pointer("/status/phase").and_then(Value::as_str).unwrap_or_default();
        ensure!(["Pending", "Running"].contains(&phase), "the pod is {phase}");
        Ok(kubectl.run(&["exec", "vm-a", "--", "test", "-e", "/share/up"]).ok().map(drop))
    });
    up.with_context(|| kubectl.tell("vm-a"))?;
    let pod = bench.pods.look("vm-a", Some(POOL))?;
    let session = ours::nic(bench.node, &pod.id)?.get("session").cloned();
    ensure!(session == Some("driver_ready".into()), "the session is {session:?}");
    bench.node.kill(ours::DAEMON, "KILL")?;
    ours::start_daemon(bench.node)?;
    bench.offered(POOL, COUNT - 1)?;
    let event = kubectl.wait_event("NicUnhealthy", "vm-a")?;
    eprintln!("    Event about vm-a: {event}");
    ensure!(event.contains(&pod.id), "the Event does not name {}: {event}", pod.id);
    kubectl.wait_phase("vm-a", "Running", WAIT)?;
    kubectl.delete_pods(&["vm-a"])?;
    bench.offered(POOL, COUNT)?;
    bench.consistent(&[])
}

/// Two VMs in two pods.
pub(crate) fn two_vms(bench: &Bench<'_>) -> Result<()> {
    import(bench, bench.cache)?;
    plane::write_network(bench.node, "1.0.0", Some(ours::CHAINED))?;
    let before: u64 = ours::bytes(bench.node)?.values().sum();
    let kubectl = bench.pods.kubectl;
    for (name, number, does) in [("b", "2", "server"), ("a", "1", "client")] {
        kubectl.create(&manifest(name, number, does))?;
    }
    for name in ["vm-a", "vm-b"] {
        wait_for(&format!("{name} to end"), WAIT, || {
            std::thread::sleep(Duration::from_secs(1));
            let pod = kubectl.pod(name)?.context("the pod is gone")?;
            let phase = pod.pointer("/status/phase").and_then(Value::as_str).unwrap_or_default();
            match phase {
                "Succeeded" => Ok(Some(())),
                "Failed" => bail!("{}", kubectl.tell(name)),
                _ => Ok(None),
            }
        })
        .with_context(|| format!("{}\n{}", kubectl.tell("vm-a"), kubectl.tell("vm-b")))?;
    }
    let text = kubectl.run(&["logs", "vm-a"])?;
    eprintln!("{text}");
    for expected in ["200 iters in", "rdma-ping-19", "lladdr"] {
        ensure!(text.contains(expected), "the client's output has no {expected:?}");
    }
    let after: u64 = ours::bytes(bench.node)?.values().sum();
    // 200 messages of 4 KiB either way, each sent and received; what rping adds is small.
    ensure!(after - before >= 4 * 200 * 4096, "only {} bytes passed the daemon", after - before);
    kubectl.delete_pods(&["vm-a", "vm-b"])?;
    bench.consistent(&[])
}
