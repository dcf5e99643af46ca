//! The node in the VM: containerd, a kubelet without an API server, our agent; pods as files in the
//! kubelet's manifest directory.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::parts::VERBS;
use crate::exec::check_interrupt;
use crate::vm::Lab;
use crate::vm::guest::Guest;

/// Two large Go programs under emulation, on a machine that others use too.
const WAIT: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(500);
pub(super) const MANIFESTS: &str = "/etc/kubernetes/manifests";
const AGENT_CONFIG: &str = "/etc/vhost-rdma-agent/config.toml";

/// The programs over the guest's own `/usr`, cgroups of version 2 (Debian 13's kernel has no memory
/// controller of version 1 any more), and the modules. The emulated IOMMU remaps no interrupts (why
/// is said in the scenario `sriov`), so vfio must be told that its users are trusted. Each physical
/// function is printed with its interface and its NUMA node.
const SET_UP: &str = r#"set -e
modprobe -a overlay bridge veth br_netfilter igb igbvf rdma_rxe ib_uverbs rdma_ucm
modprobe vfio_iommu_type1 allow_unsafe_interrupts=1
modprobe vfio-pci
mkdir -p /run/pods /opt/cni/bin /etc/cni/net.d /etc/containerd /etc/kubernetes/manifests \
  /etc/vhost-rdma-agent /host/log /sys/fs/cgroup
tar -xf /host/products/tools.tar -C /run/pods
for p in kubelet vhost-rdma vhost-rdma-agent; do cp /host/products/$p /run/pods/usr/bin/; done
cp /host/products/vhost-rdma-cni /opt/cni/bin/
mount -t overlay overlay -o lowerdir=/run/pods/usr:/usr /usr
ln -s /usr/lib/cni/* /opt/cni/bin/
mount -t cgroup2 cgroup2 /sys/fs/cgroup
hostname node1
echo 127.0.0.1 localhost node1 > /etc/hosts
for d in /sys/bus/pci/devices/*; do
  [ -e $d/sriov_totalvfs ] && [ -d $d/net ] || continue
  pf=$(ls $d/net); ip link set $pf up
  echo "pf ${d##*/} $pf $(cat $d/numa_node)"
done
"#;

/// As on a cluster's node, with CDI.
const CONTAINERD: &str = r#"
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:lab"
  disable_apparmor = true
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/opt/cni/bin"
    conf_dir = "/etc/cni/net.d"
"#;

/// The pods' network; our plugin is not in it: no RDMA device of this VM can follow its interface
/// into a pod, see the scenario's head.
const NETWORK: &str = r#"{"cniVersion": "1.0.0", "name": "lab", "plugins": [{
  "type": "bridge", "bridge": "k8sbr0", "isGateway": true, "ipMasq": false,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.222.0.0/24"}]],
           "routes": [{"dst": "0.0.0.0/0"}]}
}]}"#;

/// Kubelet 1.20 makes no cgroups of its own here: the runtime does.
const KUBELET: &str = "
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failSwapOn: false
makeIPTablesUtilChains: false
address: 127.0.0.1
readOnlyPort: 10255
staticPodPath: /etc/kubernetes/manifests
fileCheckFrequency: 1s
syncFrequency: 5s
authentication: {webhook: {enabled: false}, anonymous: {enabled: true}}
authorization: {mode: AlwaysAllow}
evictionHard: {memory.available: 20Mi, nodefs.available: 20Mi, imagefs.available: 20Mi}
";

const START_KUBELET: &str = "setsid kubelet --config=/etc/kubernetes/kubelet.yaml \
                             --hostname-override=node1 --node-ip=10.9.0.1 \
                             --container-runtime=remote \
                             --container-runtime-endpoint=unix:///run/containerd/containerd.sock \
                             --pod-infra-container-image=localhost/pause:lab < /dev/null > \
                             /host/log/kubelet.log 2>&1 &";

/// A physical function of the guest.
#[derive(Debug, Clone)]
pub(super) struct Pf {
    pub(super) address: String,
    pub(super) netdev: String,
    /// As sysfs has it; -1 is none.
    pub(super) numa: i32,
}

/// The VM with what runs in it.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) lab: Lab,
    pub(super) pfs: Vec<Pf>,
    pools: String,
}

/// A pod to be: what runs in its only container, and how many of which resource it gets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) name: &'a str,
    pub(super) pool: &'a str,
    pub(super) count: u32,
    pub(super) script: &'a str,
    /// Root has no capability either, but owns device nodes.
    pub(super) user: u32,
}

impl Wanted<'_> {
    fn manifest(&self) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": self.name, "namespace": "default"},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "containers": [{
                    "name": "c",
                    "image": VERBS,
                    "imagePullPolicy": "Never",
                    "command": ["/bin/sh", "-c", self.script],
                    "securityContext": {
                        "runAsUser": self.user, "runAsGroup": self.user,
                        "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
                    },
                    "resources": {"limits": {format!("vhost-rdma.io/{}", self.pool): self.count}},
                }],
            },
        })
    }
}

impl Node {
    /// Lays the node's programs over the guest and finds its NICs; nothing runs yet.
    pub(super) fn set_up(mut lab: Lab) -> Result<Self> {
        let said = lab.guests.first_mut().context("no guest")?.must(SET_UP, WAIT)?;
        let pfs: Vec<Pf> = said
            .lines()
            .filter_map(|line| {
                let mut words = line.strip_prefix("pf ")?.split(' ').map(str::to_owned);
                let (address, netdev) = (words.next()?, words.next()?);
                Some(Pf { address, netdev, numa: words.next()?.parse().ok()? })
            })
            .collect();
        ensure!(pfs.len() == 2, "two NICs with SR-IOV are expected in the guest: {said}");
        Ok(Self { lab, pfs, pools: String::new() })
    }

    pub(super) fn guest(&mut self) -> Result<&mut Guest> {
        self.lab.guests.first_mut().context("no guest")
    }

    /// The machine at the other end of the first NIC's cable.
    pub(super) fn peer(&mut self) -> Result<&mut Guest> {
        self.lab.guests.get_mut(1).context("no second guest")
    }

    pub(super) fn sh(&mut self, script: &str) -> Result<String> {
        self.guest()?.must(script, WAIT)
    }

    /// Writes a file of the node, through the share.
    pub(super) fn write(&mut self, path: &str, text: &str) -> Result<()> {
        std::fs::write(self.guest()?.share().join("file"), text)?;
        let (dir, name) = path.rsplit_once('/').context("an absolute path")?;
        // Under its final name at once: kubelet and agent watch their directories.
        self.sh(&format!(
            "set -e; mkdir -p {dir}; cp /host/file {dir}/.{name}; mv {dir}/.{name} {path}"
        ))
        .map(drop)
    }

    /// Starts containerd with the images, the kubelet, and the agent with these pools; returns when
    /// they are registered.
    pub(super) fn start(&mut self, pools: String) -> Result<()> {
        self.pools = pools;
        self.write("/etc/containerd/config.toml", CONTAINERD)?;
        self.write("/etc/cni/net.d/10-lab.conflist", NETWORK)?;
        self.write("/etc/kubernetes/kubelet.yaml", KUBELET)?;
        self.sh("setsid containerd < /dev/null > /host/log/containerd.log 2>&1 &
n=0; until ctr version >/dev/null 2>&1; do n=$((n+1)); [ $n -lt 200 ] || { \
    tail -20 /host/log/containerd.log; exit 1; }; sleep 0.2; done
for i in /host/images/*.tar; do ctr -n k8s.io images import $i || exit 1; done")?;
        self.sh(START_KUBELET)?;
        self.until("the kubelet", |node| {
            let health = "busybox wget -q -O - http://127.0.0.1:10255/pods > /dev/null \
                          && test -S /var/lib/kubelet/device-plugins/kubelet.sock";
            Ok(node.guest()?.run(health, WAIT)?.ok().then_some(()))
        })?;
        self.restart_agent("classic")
    }

    /// Starts the agent, or another in its place, with this way of injection. The guest's first
    /// process may leave the old one a zombie, which has no command line.
    pub(super) fn restart_agent(&mut self, injection: &str) -> Result<()> {
        let config = format!("injection = \"{injection}\"\n{}", self.pools);
        self.write(AGENT_CONFIG, &config)?;
        self.sh("if [ -e /run/agent.pid ]; then p=$(cat /run/agent.pid); kill $p; \
            while grep -q . /proc/$p/cmdline 2>/dev/null; do sleep 0.1; done; fi
setsid vhost-rdma-agent serve < /dev/null >> /host/log/agent.log 2>&1 & echo $! > /run/agent.pid")?;
        self.until("the agent's registration", |node| {
            let Ok(status) = node.status() else { return Ok(None) };
            let pools = status.get("pools").and_then(Value::as_array).cloned().unwrap_or_default();
            let all = pools.iter().all(|pool| pool.get("registered") == Some(&Value::Bool(true)));
            Ok((all && !pools.is_empty()).then_some(()))
        })
    }

    /// Tries until something is there; an error has the ends of the logs.
    pub(super) fn until<T>(
        &mut self,
        what: &str,
        mut look: impl FnMut(&mut Self) -> Result<Option<T>>,
    ) -> Result<T> {
        let begun = Instant::now();
        loop {
            if let Some(found) = look(self)? {
                return Ok(found);
            }
            check_interrupt()?;
            if begun.elapsed() > WAIT {
                let logs = self.sh("for f in /host/log/*.log; do echo $f:; tail -n 12 $f; done")?;
                bail!("waited {} s in vain for {what}\n{logs}", WAIT.as_secs());
            }
            std::thread::sleep(POLL);
        }
    }

    /// What the agent says of itself.
    pub(super) fn status(&mut self) -> Result<Value> {
        let text = self.sh("vhost-rdma-agent --json status")?;
        serde_json::from_str(&text).with_context(|| format!("the agent's status: {text}"))
    }

    /// The agent's word for each ID of a pool.
    pub(super) fn devices(&mut self, pool: &str) -> Result<Vec<Value>> {
        let status = self.status()?;
        let all = status.get("devices").and_then(Value::as_array).cloned().unwrap_or_default();
        Ok(all
            .into_iter()
            .filter(|device| device.get("pool").and_then(Value::as_str) == Some(pool))
            .collect())
    }

    /// Puts the manifest where the kubelet sees it.
    pub(super) fn create(&mut self, wanted: &Wanted<'_>) -> Result<()> {
        self.write(&format!("{MANIFESTS}/{}.json", wanted.name), &wanted.manifest().to_string())
    }

    /// A pod as the kubelet has it.
    fn pod(&mut self, name: &str) -> Result<Option<Value>> {
        let text = self.sh("busybox wget -q -O - http://127.0.0.1:10255/pods")?;
        let list: Value = serde_json::from_str(&text).context("the kubelet's pods")?;
        let items = list.get("items").and_then(Value::as_array).cloned().unwrap_or_default();
        // A static pod's name ends in its node's.
        let full = format!("{name}-node1");
        Ok(items.into_iter().find(|pod| {
            pod.pointer("/metadata/name").and_then(Value::as_str) == Some(full.as_str())
        }))
    }

    /// Waits for a phase of a pod; the pod then.
    pub(super) fn phase(&mut self, name: &str, phases: &[&str]) -> Result<Value> {
        let mut last = String::new();
        let found = self.until(&format!("pod {name} to be {}", phases.join(" or ")), |node| {
            let Some(pod) = node.pod(name)? else { return Ok(None) };
            let status = pod.get("status").cloned().unwrap_or_default();
            let phase = status.get("phase").and_then(Value::as_str).unwrap_or_default();
            last = status.to_string();
            if phases.contains(&phase) {
                return Ok(Some(Ok(pod)));
            }
            Ok(["Failed", "Succeeded"].contains(&phase).then_some(Err(())))
        });
        match found {
            Ok(Ok(pod)) => Ok(pod),
            Ok(Err(())) => bail!("pod {name} ended: {last}\nit said: {}", self.log(name)?),
            Err(error) => {
                let said = self.log(name)?;
                Err(error.context(format!("pod {name}: {last}\nit said: {said}")))
            }
        }
    }

    /// What a pod's container wrote.
    pub(super) fn log(&mut self, name: &str) -> Result<String> {
        self.sh(&format!(
            "cat /var/log/pods/default_{name}-node1_*/c/*.log 2>/dev/null | cut -d ' ' -f 4-; true"
        ))
    }

    /// The address that the network gave to a running pod.
    pub(super) fn address(&mut self, name: &str) -> Result<String> {
        let pod = self.phase(name, &["Running"])?;
        let ip = pod.pointer("/status/podIP").and_then(Value::as_str);
        Ok(ip.with_context(|| format!("pod {name} has no address"))?.to_owned())
    }

    /// A pod that runs to its end: it must end well; what it said.
    pub(super) fn run(&mut self, wanted: &Wanted<'_>) -> Result<String> {
        self.create(wanted)?;
        self.phase(wanted.name, &["Succeeded"])?;
        self.log(wanted.name)
    }

    /// Takes every pod's manifest away, after a step that failed.
    pub(super) fn clear(&mut self) -> Result<()> {
        self.sh(&format!("rm -f {MANIFESTS}/*.json")).map(drop)
    }

    /// Takes the manifests away and waits until the agent has every ID back.
    pub(super) fn delete(&mut self, names: &[&str]) -> Result<()> {
        let files: Vec<String> = names.iter().map(|n| format!("{MANIFESTS}/{n}.json")).collect();
        self.sh(&format!("rm -f {}", files.join(" ")))?;
        self.until(&format!("the IDs of {} to come back", names.join(", ")), |node| {
            let status = node.status()?;
            let all = status.get("devices").and_then(Value::as_array).cloned().unwrap_or_default();
            let free = |device: &Value| device.get("state").and_then(Value::as_str) == Some("free");
            Ok(all.iter().all(free).then_some(()))
        })
    }
}
