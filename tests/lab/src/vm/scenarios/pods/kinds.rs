//! What the pods of each kind must be able to do, and what not.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::node::{Node, Wanted};
use super::parts::VERBS;
use crate::vm::scenarios::vfs::{CARRY, PEER, PEER_ADDRESSES, find_gid};

/// How long anything takes in the peer, which does nothing else.
const SET_UP: Duration = Duration::from_secs(300);
/// The user of pods that need no root.
const USER: u32 = 1000;

/// VFs of the first NIC: two with RDMA, one for passthrough, three on its NUMA node; of the second:
/// two.
const VFS: [u32; 2] = [6, 2];

/// Makes the devices that the pools are about; see [`CARRY`] for what is before it.
const HARDWARE: &str = r"set -e
rdma link add rxe0 type rxe netdev eth0
vhost-rdma vf create @A@ 6 > /dev/null
vhost-rdma vf create @B@ 2 > /dev/null
for n in 2 3 4 5; do vhost-rdma vf bind @A@/$n > /dev/null; done
for n in 0 1; do vhost-rdma vf bind @B@/$n > /dev/null; done
carry @PCI@
";

/// The devices, before the agent looks at the node; the pools, without their head.
pub(super) fn hardware(node: &mut Node) -> Result<String> {
    let [a, b] = &node.pfs.clone()[..] else { anyhow::bail!("two NICs are expected") };
    ensure!(
        a.numa == 0 && b.numa == 1,
        "the NICs are on other nodes than QEMU was told: {a:?} {b:?}"
    );
    node.sh(&[CARRY, HARDWARE]
        .concat()
        .replace("@A@", &a.netdev)
        .replace("@B@", &b.netdev)
        .replace("@PCI@", &a.address))?;
    for (pf, count) in [a, b].into_iter().zip(VFS) {
        let made = node.sh(&format!("cat /sys/bus/pci/devices/{}/sriov_numvfs", pf.address))?;
        ensure!(made.trim() == count.to_string(), "{} has {made} VFs", pf.netdev);
    }
    let (a, b) = (&a.netdev, &b.netdev);
    Ok(format!(
        r#"
[[pools]]
name = "some"
kind = "shared"
count = 4
selectors = [{{ rdma = ["rxe0"] }}]

[[pools]]
name = "fast"
kind = "vf"
selectors = [{{ pf = ["{a}#0-1"] }}]

[[pools]]
name = "raw"
kind = "vf-vfio"
selectors = [{{ pf = ["{a}#2"] }}]

[[pools]]
name = "near"
kind = "vf-vfio"
selectors = [{{ pf = ["{a}#3-5"] }}, {{ pf = ["{b}"] }}]
"#
    ))
}

fn gid(node: &mut Node, device: &str, address: [u8; 4]) -> Result<String> {
    Ok(node.sh(&find_gid(device, address))?.trim().to_owned())
}

/// `ibv_devinfo` of the device that a pool gave to a pod.
fn sees(said: &str, device: &str) -> Result<()> {
    ensure!(
        said.contains(&format!("hca_id:\t{device}\n")) && said.contains("PORT_ACTIVE"),
        "ibv_devinfo does not show an active {device}: {said}"
    );
    Ok(())
}

/// The device of another pool is listed, since RDMA is in shared mode, but cannot be opened.
fn looks(pool: &str, other: &str) -> String {
    format!(
        "env; ls -l /dev/infiniband; ibv_devinfo -d $VHOST_RDMA_{pool}_0_RDMA_DEVICE || exit 1
if ibv_devinfo -d {other}; then echo {other} can be opened; exit 1; fi"
    )
}

pub(super) fn shared_devinfo(node: &mut Node) -> Result<()> {
    let script = looks("SOME", "rxevf0");
    let wanted =
        Wanted { name: "shared-info", pool: "some", count: 1, script: &script, user: USER };
    let said = node.run(&wanted)?;
    sees(&said, "rxe0")?;
    ensure!(
        said.contains("VHOST_RDMA_SOME_0_ID=some-rxe0-"),
        "the pod has no ID of the pool in its environment: {said}"
    );
    node.delete(&[wanted.name])
}

/// `ibv_rc_pingpong -c` from one pod to another.
pub(super) fn shared_pingpong(node: &mut Node) -> Result<()> {
    let gid = gid(node, "rxe0", [10, 9, 0, 1])?;
    let program = format!("ibv_rc_pingpong -d $VHOST_RDMA_SOME_0_RDMA_DEVICE -g {gid} -n 100 -c");
    let server = Wanted { name: "shared-a", pool: "some", count: 1, script: &program, user: USER };
    node.create(&server)?;
    let address = node.address(server.name)?;
    let script = format!(
        "for n in 1 2 3 4 5 6 7 8 9 10; do {program} {address} && exit; sleep 1; done; exit 1"
    );
    let client = Wanted { name: "shared-b", script: &script, ..server };
    let said = node.run(&client)?;
    let ended = node.phase(server.name, &["Succeeded"]);
    ended.with_context(|| format!("the client said: {said}"))?;
    let served = node.log(server.name)?;
    for (who, text) in [("client", &said), ("server", &served)] {
        ensure!(text.contains("usec/iter"), "the {who} had no pingpong: {text}");
    }
    node.delete(&[server.name, client.name])
}

pub(super) fn vf_devinfo(node: &mut Node) -> Result<()> {
    // The second VF is another pod's; which of the two the kubelet takes is its choice.
    let script =
        "env; ls -l /dev/infiniband; ibv_devinfo -d $VHOST_RDMA_FAST_0_RDMA_DEVICE || exit 1
for other in rxe0 rxevf0 rxevf1; do
  [ $other = $VHOST_RDMA_FAST_0_RDMA_DEVICE ] && continue
  if ibv_devinfo -d $other; then echo $other can be opened; exit 1; fi
done";
    let wanted = Wanted { name: "vf-info", pool: "fast", count: 1, script, user: USER };
    let said = node.run(&wanted)?;
    let device = variable(&said, "VHOST_RDMA_FAST_0_RDMA_DEVICE")?;
    let pci = variable(&said, "VHOST_RDMA_FAST_0_PCI")?;
    sees(&said, device)?;
    let carried = node.sh(&format!("ls /sys/bus/pci/devices/{pci}/net"))?;
    let netdev = node.sh(&format!("cat /sys/class/infiniband/{device}/parent"))?;
    ensure!(
        carried.trim() == netdev.trim(),
        "{device} is on {}, and the pod was told the VF of {}",
        netdev.trim(),
        carried.trim()
    );
    node.delete(&[wanted.name])
}

/// A pod with both VFs, and `ibv_rc_pingpong -c` through each to a machine that knows nothing of
/// us.
pub(super) fn vf_pingpong(node: &mut Node) -> Result<()> {
    node.peer()?.must(PEER, SET_UP)?;
    let (mut jobs, mut script) = (Vec::new(), "set -e\n".to_owned());
    for (n, address) in PEER_ADDRESSES.into_iter().enumerate() {
        let [a, b, c, _] = address;
        let theirs = node.peer()?.must(&find_gid("rxe0", address), SET_UP)?;
        let ours = gid(node, &format!("rxevf{n}"), [a, b, c, 1])?;
        let program = format!("ibv_rc_pingpong -p {} -n 100 -c", 18515 + n);
        let serve = format!("ulimit -l unlimited; {program} -d rxe0 -g {}", theirs.trim());
        jobs.push(node.peer()?.spawn(&serve)?);
        script += &format!(
            "for n in 1 2 3 4 5 6 7 8 9 10; do {program} -d rxevf{n} -g {ours} 10.11.0.200 \
             && break; sleep 1; done; [ $n -lt 10 ]\n"
        );
    }
    let wanted = Wanted { name: "vf-both", pool: "fast", count: 2, script: &script, user: USER };
    let said = node.run(&wanted)?;
    for job in jobs {
        let served = node.peer()?.wait(job, SET_UP)?;
        ensure!(served.ok(), "the peer had no pingpong: {}; the pod said: {said}", served.text);
    }
    let held = said.lines().filter(|line| line.contains("usec/iter")).count();
    ensure!(held == 2, "a pingpong through each VF was expected: {said}");
    node.delete(&[wanted.name])
}

/// The value of a variable in the output of `env`.
fn variable<'a>(said: &'a str, name: &str) -> Result<&'a str> {
    let found = said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    found.with_context(|| format!("the pod has no {name}: {said}"))
}

pub(super) fn vfio(node: &mut Node) -> Result<()> {
    // In the container there is its own group and nobody else's.
    let script = "env; ls /dev/vfio
for g in /dev/vfio/*; do case $g in */vfio) ;; *) group=${g##*/};; esac; done
exec /bin/vrdma-vfio $group $VHOST_RDMA_RAW_0_PCI";
    let wanted = Wanted { name: "raw", pool: "raw", count: 1, script, user: 0 };
    let said = node.run(&wanted)?;
    let pci = variable(&said, "VHOST_RDMA_RAW_0_PCI")?.to_owned();
    let known = node.sh(&format!(
        "basename $(readlink -f /sys/bus/pci/devices/{pci}/iommu_group); \
         basename $(readlink -f /sys/bus/pci/devices/{pci}/driver)"
    ))?;
    let [group, driver] = known.split_whitespace().collect::<Vec<_>>()[..] else {
        anyhow::bail!("no group or driver of {pci}: {known}")
    };
    ensure!(driver == "vfio-pci", "{pci} is driven by {driver}");
    let nodes: Vec<&str> = said.lines().skip_while(|line| *line != group).take(2).collect();
    ensure!(nodes == [group, "vfio"], "the pod's /dev/vfio is not {group} and vfio: {said}");
    // 8086:10ca is an 82576's virtual function.
    ensure!(
        said.contains(&format!("{pci} is 8086:10ca, a page is mapped")),
        "the pod could not open its function: {said}"
    );
    node.delete(&[wanted.name])
}

/// The kubelet's own record of what it gave to a pod: IDs by the NUMA node that ListAndWatch told
/// it.
fn given(node: &mut Node, pool: &str) -> Result<Vec<(String, String)>> {
    let text = node.sh("cat /var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")?;
    let value: Value = serde_json::from_str(&text).context("the kubelet's checkpoint")?;
    let resource = format!("vhost-rdma.io/{pool}");
    let entries = value.pointer("/Data/PodDeviceEntries").and_then(Value::as_array);
    let mut found = Vec::new();
    for entry in entries.into_iter().flatten() {
        if entry.get("ResourceName").and_then(Value::as_str) != Some(&resource) {
            continue;
        }
        let by_node = entry.get("DeviceIDs").and_then(Value::as_object);
        for (numa, ids) in by_node.into_iter().flatten() {
            let ids = ids.as_array().into_iter().flatten().filter_map(Value::as_str);
            found.extend(ids.map(|id| (numa.clone(), id.to_owned())));
        }
    }
    Ok(found)
}

/// Two of the five free functions must be the two of node 1, the group that they fill; three the
/// three of node 0. A kubelet that was told no preference takes any of ten sets each time.
pub(super) fn numa(node: &mut Node) -> Result<()> {
    for (count, wanted_node) in [(2_u32, "1"), (3, "0")] {
        let name = format!("near-{count}");
        let wanted =
            Wanted { name: &name, pool: "near", count, script: "env; sleep 1000", user: USER };
        node.create(&wanted)?;
        node.phase(&name, &["Running"])?;
        let given = given(node, "near")?;
        ensure!(
            given.len() == count as usize && given.iter().all(|(numa, _)| numa == wanted_node),
            "{count} functions of node {wanted_node} were expected: {given:?}"
        );
        for (numa, id) in &given {
            let real = node.sh(&format!("cat /sys/bus/pci/devices/{id}/numa_node"))?;
            ensure!(real.trim() == numa, "{id} is on node {}, not {numa}", real.trim());
        }
        node.delete(&[&name])?;
    }
    Ok(())
}

/// The kubelet stands still while somebody else uses its runtime: it ends every sandbox that it did
/// not ask for (kubelet_pods.go, HandlePodCleanups).
const ALONE: &str = "set -e; pkill -STOP -x kubelet; trap 'pkill -CONT -x kubelet' EXIT";

/// The agent with `injection = "cdi"`, a runtime that knows the CDI field, and the example that
/// stands for a kubelet new enough to set it.
pub(super) fn cdi(node: &mut Node) -> Result<()> {
    node.restart_agent("cdi")?;
    for (pool, device) in [("some", "rxe0"), ("fast", "rxevf")] {
        let free = node.devices(pool)?;
        let id = free.first().and_then(|d| d.get("id")).and_then(Value::as_str);
        let id = id.with_context(|| format!("pool {pool} has no IDs"))?.to_owned();
        let variable = format!("$VHOST_RDMA_{}_0_RDMA_DEVICE", pool.to_uppercase());
        let file = format!("/var/run/cdi/vhost-rdma.io-nic_{id}.json");
        let said = node.sh(&format!(
            "{ALONE}; test ! -e {file}
/host/products/cri-pod --plugin /var/lib/kubelet/device-plugins/vhost-rdma-{pool}.sock --image \
    {VERBS} --id {id} -- /bin/sh -c 'ls -l /dev/infiniband; exec ibv_devinfo -d {variable}'
cat {file}"
        ))?;
        ensure!(
            said.contains(&format!("cdi vhost-rdma.io/nic={id}\n")),
            "the agent did not name the device of {id}: {said}"
        );
        ensure!(
            said.contains(&format!("hca_id:\t{device}")) && said.contains("PORT_ACTIVE"),
            "ibv_devinfo does not show an active {device}: {said}"
        );
        // No kubelet lists it to anybody, so it comes back, and its specification goes.
        node.delete(&[])?;
        node.sh(&format!("test ! -e '{file}'"))?;
    }
    node.restart_agent("classic")
}
