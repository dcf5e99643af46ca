//! The servers of a cluster on one node, in the order in which they need each other.
//!
//! Everything listens on addresses that only the node's network namespace has. Certificates last a
//! day: a cluster does not.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::exec::{Progress, wait_for};
use crate::k8s::kubectl::Kubectl;
use crate::k8s::node::Node;
use crate::k8s::parts::{Parts, SERVERS};

const WAIT: Duration = Duration::from_secs(120);

/// One CA; a serving certificate for the API server; a client certificate and a kubeconfig for
/// everybody else. `$1` is the directory.
const PKI: &str = r#"
cd "$1"
new() { # name, subject, extensions
  openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"
  openssl req -new -key "$1.key" -subj "$2" -out "$1.csr"
  printf '%s\n' "$3" > "$1.ext"
  openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 1 \
    -extfile "$1.ext" -out "$1.crt"
}
client() { # file, subject
  new "$1" "$2" extendedKeyUsage=clientAuth
  cat > "$1.kubeconfig" <<END
apiVersion: v1
kind: Config
clusters:
- {name: lab, cluster: {server: "https://127.0.0.1:6443", certificate-authority: $PWD/ca.crt}}
users: [{name: $1, user: {client-certificate: $PWD/$1.crt, client-key: $PWD/$1.key}}]
contexts: [{name: lab, context: {cluster: lab, user: $1}}]
current-context: lab
END
}
openssl ecparam -name prime256v1 -genkey -noout -out ca.key
openssl req -x509 -new -key ca.key -subj /CN=lab-ca -days 1 -out ca.crt
openssl ecparam -name prime256v1 -genkey -noout -out sa.key
openssl ec -in sa.key -pubout -out sa.pub
new apiserver /CN=kube-apiserver 'subjectAltName=IP:127.0.0.1,IP:10.96.0.1,IP:10.222.0.1,DNS:localhost,DNS:kubernetes.default.svc'
client admin /O=system:masters/CN=admin
client node /O=system:nodes/CN=system:node:node1
client node2 /O=system:nodes/CN=system:node:node2
client kcm /CN=system:kube-controller-manager
client scheduler /CN=system:kube-scheduler
client agent /CN=vhost-rdma-agent
account() { # file, account of our namespace
  client "$1" "/O=system:serviceaccounts/O=system:serviceaccounts:vhost-rdma/CN=system:serviceaccount:vhost-rdma:$2"
}
account of-controller vhost-rdma-controller
account of-agents vhost-rdma-agent
"#;

/// `restrict_oom_score_adj`: root in a container often has no CAP_SYS_RESOURCE, without which runc
/// cannot lower the score of a sandbox.
const CONTAINERD: &str = r#"
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:lab"
  restrict_oom_score_adj = true
  disable_apparmor = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/opt/cni/bin"
    conf_dir = "/etc/cni/net.d"
"#;

const KUBELET: &str = "
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
failSwapOn: false
makeIPTablesUtilChains: false
address: 0.0.0.0
readOnlyPort: 0
authentication:
  {x509: {clientCAFile: /lab/pki/ca.crt}, webhook: {enabled: false}, anonymous: {enabled: false}}
authorization: {mode: AlwaysAllow}
evictionHard: {memory.available: 50Mi, nodefs.available: 50Mi, imagefs.available: 50Mi}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
maxPods: 250
nodeStatusUpdateFrequency: 2s
syncFrequency: 10s
";

/// The pod network, the way most clusters have one; our plugin is chained behind it when it is
/// there. `SUBNET` is the node's.
const BRIDGE: &str = r#"{
  "type": "bridge", "bridge": "k8sbr0", "isGateway": true, "ipMasq": false,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.222.SUBNET.0/24"}]],
           "routes": [{"dst": "0.0.0.0/0"}]}
}"#;

const APISERVER: &[&str] = &[
    "--etcd-servers=http://127.0.0.1:2379",
    "--bind-address=0.0.0.0",
    "--advertise-address=127.0.0.1",
    "--secure-port=6443",
    "--tls-cert-file=/lab/pki/apiserver.crt",
    "--tls-private-key-file=/lab/pki/apiserver.key",
    "--client-ca-file=/lab/pki/ca.crt",
    "--service-account-issuer=https://kubernetes.default.svc",
    "--service-account-key-file=/lab/pki/sa.pub",
    "--service-account-signing-key-file=/lab/pki/sa.key",
    "--service-cluster-ip-range=10.96.0.0/16",
    "--authorization-mode=Node,RBAC",
    "--enable-admission-plugins=NodeRestriction",
    "--kubelet-client-certificate=/lab/pki/admin.crt",
    "--kubelet-client-key=/lab/pki/admin.key",
    "--allow-privileged=true",
    "--kubelet-preferred-address-types=InternalIP",
    "--endpoint-reconciler-type=none",
];

const KCM: &[&str] = &[
    "--kubeconfig=/lab/pki/kcm.kubeconfig",
    "--bind-address=127.0.0.1",
    "--port=0",
    "--secure-port=10257",
    "--use-service-account-credentials",
    "--service-account-private-key-file=/lab/pki/sa.key",
    "--root-ca-file=/lab/pki/ca.crt",
    "--leader-elect=false",
];

const SCHEDULER: &[&str] = &[
    "--kubeconfig=/lab/pki/scheduler.kubeconfig",
    "--bind-address=127.0.0.1",
    "--port=0",
    "--secure-port=10259",
    "--leader-elect=false",
];

const KUBELET_ARGS: &[&str] = &[
    "--config=/lab/kubelet.yaml",
    "--kubeconfig=/lab/pki/node.kubeconfig",
    "--container-runtime=remote",
    "--container-runtime-endpoint=unix:///run/containerd/containerd.sock",
    "--pod-infra-container-image=localhost/pause:lab",
];

const ETCD: &[&str] = &[
    "--data-dir=/var/lib/etcd",
    "--listen-client-urls=http://127.0.0.1:2379",
    "--advertise-client-urls=http://127.0.0.1:2379",
    "--listen-peer-urls=http://127.0.0.1:2380",
    "--initial-advertise-peer-urls=http://127.0.0.1:2380",
    "--initial-cluster=default=http://127.0.0.1:2380",
    "--unsafe-no-fsync",
];

fn start(node: &Node, name: &str, args: &[&str]) -> Result<()> {
    let program = format!("/lab/bin/{name}");
    let mut command = vec![program.as_str()];
    command.extend_from_slice(args);
    node.spawn(name, &command)
}

/// Starts kubelet; it comes back with what it has on disk.
pub(crate) fn start_kubelet(node: &Node) -> Result<()> {
    let name = format!("--hostname-override={}", node.name());
    let address = format!("--node-ip=10.222.{}.1", node.subnet());
    let mut args = KUBELET_ARGS.to_vec();
    args.extend([name.as_str(), address.as_str()]);
    start(node, "kubelet", &args)
}

/// Starts the API server and waits until it answers.
pub(crate) fn start_apiserver(node: &Node) -> Result<()> {
    start(node, "kube-apiserver", APISERVER)?;
    wait_for("the API server", WAIT, || {
        node.check_alive("kube-apiserver")?;
        Ok(Kubectl::new(node).run(&["get", "--raw", "/readyz"]).ok())
    })
    .map(drop)
}

/// An error if a server of the cluster is gone.
pub(crate) fn healthy(node: &Node) -> Result<()> {
    SERVERS.iter().chain(&["containerd", "etcd"]).try_for_each(|name| node.check_alive(name))
}

/// The node's network configuration list: the bridge, and what is chained behind it.
pub(crate) fn network(node: &Node, version: &str, chained: Option<&str>) -> String {
    let more = chained.map(|c| format!(", {c}")).unwrap_or_default();
    let bridge = BRIDGE.replace("SUBNET", &node.subnet().to_string());
    format!("{{\"cniVersion\": \"{version}\", \"name\": \"lab\", \"plugins\": [{bridge}{more}]}}\n")
}

/// Gives the node this list.
pub(crate) fn write_network(node: &Node, version: &str, chained: Option<&str>) -> Result<()> {
    let list = network(node, version, chained);
    // Under its final name at once: containerd watches the directory and reads whatever it sees.
    let dir = node.path("/etc/cni/net.d");
    fs::write(dir.join(".new"), list)?;
    fs::rename(dir.join(".new"), dir.join("10-lab.conflist"))?;
    Ok(())
}

/// What every node has: the servers' programs, the configuration of containerd, kubelet and the pod
/// network.
pub(crate) fn furnish(node: &Node, parts: &Parts) -> Result<()> {
    let bin = node.lab().join("bin");
    fs::create_dir_all(&bin)?;
    for server in SERVERS {
        let (from, to) = (parts.servers.join(server), bin.join(server));
        // A hard link where cache and state are on one file system: 340 MB less to copy.
        if fs::hard_link(&from, &to).is_err() {
            fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        }
    }
    fs::create_dir_all(node.path("/etc/containerd"))?;
    fs::write(node.path("/etc/containerd/config.toml"), CONTAINERD)?;
    fs::write(node.lab().join("kubelet.yaml"), KUBELET)?;
    write_network(node, "0.4.0", None)?;
    node.sh("ln -s /usr/lib/cni/* /opt/cni/bin/").map(drop)
}

/// Waits until the cluster calls a node Ready.
pub(crate) fn wait_ready(
    first: &Node,
    name: &str,
    mut look: impl FnMut() -> Result<()>,
) -> Result<()> {
    let path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}";
    wait_for(&format!("{name} to become Ready"), WAIT, || {
        look()?;
        let ready = Kubectl::new(first).run(&["get", "node", name, "-o", path]);
        Ok(ready.is_ok_and(|r| r == "True").then_some(()))
    })
    .map(drop)
}

/// etcd and the API server, alone: who needs no pods needs nothing else.
pub(crate) fn start_api(node: &Node, parts: &Parts) -> Result<()> {
    furnish(node, parts)?;
    let mut progress = Progress::new("starting an API server");
    serve_api(node, &mut progress)?;
    progress.done("it answers");
    Ok(())
}

/// etcd, which is this program, and everybody's certificates.
pub(crate) fn start_store(node: &Node, etcd: &str) -> Result<()> {
    let mut command = vec![etcd];
    command.extend_from_slice(ETCD);
    node.spawn("etcd", &command)?;
    node.run(&["sh", "-ec", &format!("mkdir -p /lab/pki; {PKI}"), "sh", "/lab/pki"])?;
    wait_for("etcd", WAIT, || {
        node.check_alive("etcd")?;
        std::thread::sleep(Duration::from_millis(50));
        Ok(node.sh("busybox wget -q -O /dev/null http://127.0.0.1:2379/health").ok())
    })
    .map(drop)
}

fn serve_api(node: &Node, progress: &mut Progress) -> Result<()> {
    start_store(node, "etcd")?;
    start(node, "kube-apiserver", APISERVER)?;
    wait_for("the API server", WAIT, || {
        node.check_alive("kube-apiserver")?;
        progress.tick();
        Ok(Kubectl::new(node).run(&["get", "--raw", "/readyz"]).ok())
    })
    .map(drop)
}

/// etcd, the API server, controller manager and scheduler on `node`, which itself is in no cluster
/// yet.
pub(crate) fn start_servers(node: &Node, parts: &Parts) -> Result<()> {
    furnish(node, parts)?;
    let mut progress = Progress::new("starting the servers of a cluster");
    serve_api(node, &mut progress)?;
    start(node, "kube-controller-manager", KCM)?;
    start(node, "kube-scheduler", SCHEDULER)?;
    progress.done("they answer");
    Ok(())
}

/// The whole cluster on `node`; returns when it is Ready.
pub(crate) fn start_all(node: &Node, parts: &Parts) -> Result<()> {
    start_servers(node, parts)?;
    let mut progress = Progress::new("starting a node");
    let kubectl = Kubectl::new(node);
    node.spawn("containerd", &["containerd"])?;
    wait_for("containerd", WAIT, || {
        node.check_alive("containerd")?;
        progress.tick();
        Ok(node.run(&["ctr", "version"]).ok())
    })?;
    start_kubelet(node)?;
    wait_ready(node, "node1", || {
        progress.tick();
        healthy(node)
    })?;
    wait_for("the default service account", WAIT, || {
        progress.tick();
        Ok(kubectl.run(&["get", "serviceaccount", "default"]).ok())
    })?;
    // The `kubernetes` service, as kube-proxy would make it: what programs in pods know of the API
    // server.
    node.sh("ip addr add 10.96.0.1/32 dev lo
for chain in OUTPUT PREROUTING; do
  iptables -t nat -A $chain -d 10.96.0.1 -p tcp --dport 443 -j REDIRECT --to-ports 6443
done")?;
    // What the agent may do in the cluster; more would hide that it needs more.
    kubectl.run(&[
        "create",
        "clusterrole",
        "vhost-rdma-agent",
        "--verb=create,patch",
        "--resource=events.events.k8s.io",
    ])?;
    let (role, user) = ("--clusterrole=vhost-rdma-agent", "--user=vhost-rdma-agent");
    kubectl.run(&["create", "clusterrolebinding", "vhost-rdma-agent", role, user])?;
    progress.done("the node is Ready");
    Ok(())
}
