//! Plain pods whose own processes have NICs: an image with Debian's perftest and the examples of
//! libibverbs, as they are, in pods that are "restricted". No VM, no device of the host's, and
//! nothing of ours in the image: the agent brings the socket and the libraries.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::cache::Cache;
use crate::exec;
use crate::host::Archive;
use crate::k8s::cluster::{ADDRESSED, ours_is};
use crate::k8s::image::Image;
use crate::k8s::pods::{Pod, Wanted};
use crate::k8s::test::Bench;
use crate::k8s::{ours, plane};
use crate::process::products;
use crate::roots::{Recipe, mmdebstrap, owned};

const POOL: &str = "plain";
const OTHER: &str = "apart";
const IMAGE: &str = "localhost/perftest:lab";
const SUITE: &str = "bookworm";
/// A pool that the controller makes, of a network that has addresses.
const LED: &str = "shells";
const PACKAGES: [&str; 5] = ["coreutils", "dash", "ibverbs-utils", "perftest", "rdmacm-utils"];
/// Tries of a client that is to be refused: its server is up after one or two.
const REFUSED: u32 = 10;
/// Where the agent has the libraries from, unless its configuration says otherwise.
const LIBRARIES: &str = "/usr/lib/vhost-rdma";

/// What UCX and NCCL read beside a device, each on a line, and the node that UCX opens: where the
/// node has none of a kernel's driver, those that the agent brings
/// (vhost-rdma/process/files/files.c). Without them, and for a device that is not there, there is
/// nothing: the pod has no more of the host's than any other.
const LOOKED_FOR: &str = r#"
at=/sys/class/infiniband/vhost_rdma0 node=/dev/infiniband/vhost_rdma0
cat $at/ports/1/gid_attrs/types/0 $at/node_type $at/ports/1/link_layer $at/ports/1/state
[ -c $node ] && : <> $node && echo node
for file in $at/ports/1/gid_attrs/types/0 $at/node_type $node; do
  env -u LD_PRELOAD test -e $file && { echo "$file is there without the library"; exit 1; }
done
! cat $at/ports/2/gid_attrs/types/0 /dev/infiniband/other 2> /dev/null
"#;
const FOUND: &str = "RoCE v2\n1: CA\nEthernet\n4: ACTIVE\nnode\n";

/// Debian's packages and what they need, and nothing else.
pub(crate) fn root(cache: &Cache) -> Result<PathBuf> {
    let archive = Archive::open(cache, &[SUITE])?;
    let inputs = format!("1\n{}", archive.resolve(&PACKAGES)?.join("\n"));
    let name = "k8s-perftest";
    if !cache.has(name, &inputs) && archive.renew(cache)? {
        return root(cache);
    }
    let dir = cache.artefact(name, &inputs, |tmp| {
        let packages = owned(&PACKAGES);
        let recipe = Recipe { name, suite: SUITE, variant: "essential", packages: &packages };
        mmdebstrap(cache, &archive, &recipe, &tmp.join("root"))
    })?;
    Ok(dir.join("root"))
}

impl Bench<'_> {
    fn install_for_processes(&self) -> Result<()> {
        let to = self.node.path(LIBRARIES);
        fs::create_dir_all(&to)?;
        for entry in fs::read_dir(products::libraries(self.cache)?)? {
            let entry = entry?;
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
        Image::on_root(&root(self.cache)?).import(self.node, IMAGE)
    }

    fn plain_pod(&self, name: &str, pool: &str) -> Result<Pod> {
        let plain = Some((IMAGE, &["/bin/sleep", "1000000"][..]));
        self.pods.start(&Wanted { plain, ..Wanted::new(name, pool) })
    }

    fn in_pod(&self, pod: &Pod, script: &str) -> Result<String> {
        self.pods.kubectl.run(&["exec", &pod.name, "--", "/bin/sh", "-c", script])
    }

    /// A program with its server in one pod and its client in another: what the client printed.
    fn between(&self, program: &str, server: &Pod, client: &Pod) -> Result<String> {
        self.tried((program, 10 * exec::patience()), server, client)
    }

    /// The same, with so many tries: the server is there when its port is. It ends with its client,
    /// or one whose client came to nothing would poll for the rest of its time.
    fn tried(&self, how: (&str, u32), server: &Pod, client: &Pod) -> Result<String> {
        let (program, tries) = how;
        let both = format!("timeout {} {program} -d vhost_rdma0", 40 * exec::patience());
        self.in_pod(server, &format!("{both} > /dev/null 2>&1 & echo $! > /tmp/server"))?;
        let script = format!(
            "for i in $(seq {tries}); do sleep 0.3; {both} {} && exit; done; exit 1",
            server.ip
        );
        let said = self.in_pod(client, &script);
        self.in_pod(server, "kill $(cat /tmp/server) 2> /dev/null || true")?;
        said.with_context(|| format!("{program} in {}", client.name))
    }

    fn grown(&self, run: impl FnOnce() -> Result<()>, pods: [&Pod; 2]) -> Result<[u64; 2]> {
        let before = ours::bytes(self.node)?;
        run()?;
        let after = ours::bytes(self.node)?;
        let of = |pod: &Pod| {
            let count = |bytes: &std::collections::BTreeMap<String, u64>| {
                bytes.get(&pod.id).copied().unwrap_or_default()
            };
            count(&after).saturating_sub(count(&before))
        };
        Ok(pods.map(of))
    }

    /// A pod of another network reaches nobody of this one, neither by verbs nor by the connection
    /// manager, though its NIC works and its packets arrive: a server on its own side is reached by
    /// the same programs.
    fn apart(&self, pod: &Pod, stranger: &Pod) -> Result<()> {
        const BY_ADDRESS: &str = "ibv_rc_pingpong -c -g 0 -n 200";
        const BY_CONNECTION: &str = "ib_write_bw -R -F -n 200";
        let own = || {
            self.between(BY_ADDRESS, stranger, stranger)?;
            self.between(BY_CONNECTION, stranger, stranger).map(drop)
        };
        let [moved, elsewhere] = self.grown(own, [stranger, pod])?;
        ensure!(
            moved >= 2 * 200 * 4096 + 200 * 65536,
            "the stranger's own NIC moved {moved} bytes"
        );
        ensure!(elsewhere == 0, "{elsewhere} of the stranger's own bytes came to {}", pod.name);
        let refused = || {
            for program in [BY_ADDRESS, BY_CONNECTION] {
                let reached = self.tried((program, REFUSED), pod, stranger);
                ensure!(
                    reached.is_err(),
                    "{program}: a pod of another network reached {}",
                    pod.name
                );
            }
            Ok(())
        };
        let [came, _] = self.grown(refused, [pod, stranger])?;
        ensure!(came == 0, "{came} bytes came from another network");
        Ok(())
    }

    fn restricted(&self, pod: &Pod) -> Result<()> {
        let text = self.in_pod(
            pod,
            "grep -E '^(CapEff|NoNewPrivs|Uid)' /proc/self/status; ls /dev/infiniband 2>&1 || true",
        )?;
        for wanted in ["Uid:\t1000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "No such"] {
            ensure!(text.contains(wanted), "the pod is not as restricted as it should be: {text}");
        }
        Ok(())
    }
}

/// Two of one network, and one of another.
pub(crate) fn pods(bench: &mut Bench<'_>) -> Result<()> {
    bench.install_for_processes()?;
    // A chain without addresses of its own: a NIC has its pod's.
    plane::write_network(bench.node, "1.0.0", Some(ours::CHAINED))?;
    bench.offered(POOL, 4)?;
    let a = bench.plain_pod("plain-a", POOL)?;
    let b = bench.plain_pod("plain-b", POOL)?;
    let stranger = bench.plain_pod("plain-apart", OTHER)?;
    bench.restricted(&a)?;
    let devices = bench.in_pod(&a, "ibv_devinfo")?;
    ensure!(devices.contains("vhost_rdma0") && devices.contains("PORT_ACTIVE"), "{devices}");
    let found = bench.in_pod(&a, LOOKED_FOR).context("what programs look for beside a device")?;
    ensure!(found == FOUND, "beside a device programs find:\n{found}");
    let compared = || bench.between("ibv_rc_pingpong -c -g 0 -n 200", &a, &b).map(drop);
    let [at_a, at_b] = bench.grown(compared, [&a, &b])?;
    ensure!(at_a == at_b && at_a >= 2 * 200 * 4096, "the NICs moved {at_a} and {at_b} bytes");
    bench.between("ib_write_bw -F -x 0 -n 200", &a, &b)?;
    for pod in [&a, &b] {
        let nic = ours::nic(bench.node, &pod.id)?;
        let addresses = nic.get("addresses").cloned().unwrap_or_default();
        ensure!(addresses == serde_json::json!([pod.ip]), "{}: {addresses}", pod.ip);
    }
    // The daemon's connection manager knows the pods by these.
    bench.between("ib_write_bw -R -F -n 200", &a, &b)?;
    bench.apart(&a, &stranger)?;
    bench.consistent(&[a.clone(), b.clone(), stranger.clone()])?;
    bench.pods.kubectl.delete_pods(&[&a.name, &b.name, &stranger.name])?;
    bench.consistent(&[])
}

/// A class for processes, by `kubectl`: its pods have libraries, and NICs with addresses of the
/// network's own, by which rdma_cm connects them.
pub(crate) fn led(bench: &mut Bench<'_>) -> Result<()> {
    bench.install_for_processes()?;
    let kubectl = bench.pods.kubectl;
    let class = json!({
        "consumer": "Process", "limits": {"maxQps": 32},
        // The user of the pods, who opens it.
        "socket": {"owner": 1000, "group": 1000, "mode": "0660"},
    });
    kubectl.apply(&ours_is("RdmaNicClass", LED, &class))?;
    let pool = json!({"name": LED, "network": ADDRESSED, "class": LED, "count": 2});
    kubectl.apply(&ours_is(
        "RdmaNodePolicy",
        LED,
        &json!({"nodeSelector": {}, "pools": [pool]}),
    ))?;
    bench.offered(LED, 2)?;
    let pods = [bench.plain_pod("led-a", LED)?, bench.plain_pod("led-b", LED)?];
    let [a, b] = &pods;
    let mut addresses = Vec::new();
    for pod in &pods {
        let nic = ours::nic(bench.node, &pod.id)?;
        let address = nic.pointer("/addresses/0").and_then(serde_json::Value::as_str);
        let address = address.filter(|address| address.starts_with("10.77."));
        addresses
            .push(address.with_context(|| format!("the NIC has the addresses {nic}"))?.to_owned());
        ensure!(nic.pointer("/limits/max_qps") == Some(&32.into()), "the class's limit: {nic}");
    }
    let server = format!("rping -s -a {} -C 20 > /dev/null 2>&1 &", addresses[0]);
    bench.in_pod(a, &server)?;
    let client = format!(
        "for i in 1 2 3 4 5 6 7 8 9 10; do \
         sleep 0.3; rping -c -a {} -C 20 -v && exit; done; exit 1",
        addresses[0]
    );
    let said = bench.in_pod(b, &client).context("rping between the pods' NICs")?;
    let pings = said.matches("ping data: rdma-ping-").count();
    ensure!(pings == 20, "{pings} pings of 20:\n{said}");
    kubectl.delete_pods(&[&a.name, &b.name])?;
    for object in [format!("rdmanodepolicy/{LED}"), format!("rdmanicclass/{LED}")] {
        kubectl.run(&["delete", &object])?;
    }
    bench.offered(LED, 0)
}
