//! `manifests/node` in the cluster: an image after `Containerfile`, the DaemonSets, an upgrade, and
//! the way back, as docs/KUBERNETES.md tells an administrator. The daemon and the agent that the
//! node began with are gone by then: whatever pods get, they get from containers.
//!
//! The files are used as they are, with the image, the pools and the CNI chain of this cluster in
//! the places where an administrator writes them.

mod rights;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::exec::{wait_for, workspace};
use crate::k8s::image::Image;
use crate::k8s::node::Node;
use crate::k8s::ours;
use crate::k8s::pods::{Pod, Wanted};
use crate::k8s::test::{Bench, POOL as FORMER};
use crate::k8s::{cluster, parts, plane, restarts, rollout};
use crate::process::products;
use crate::products::{Profile, static_programs};

const NAMESPACE: &str = "vhost-rdma";
const CONFIG: &str = "vhost-rdma-node";
const LABEL: &str = "app.kubernetes.io/part-of=vhost-rdma";
const DAEMON: &str = "vhost-rdma-daemon";
const AGENT: &str = "vhost-rdma-agent";
const CNI: &str = "vhost-rdma-cni";
pub(crate) const IMAGE: &str = "localhost/vhost-rdma-node";
/// Where the administrator has the files, and the overlay for pools of kind process over them.
const DIR: &str = "/lab/node";
const OVERLAY: &str = "/lab/node-process";
/// Where pods' programs find the libraries on the node.
const LIBRARIES: &str = "/usr/lib/vhost-rdma";
const CHAIN: &str = "/etc/cni/net.d/00-vhost-rdma.conflist";
const PLUGIN: &str = "/opt/cni/bin/vhost-rdma-cni";
const WAIT: Duration = Duration::from_secs(240);
const MINE: &str = "packed";
const USERS: [&str; 2] = ["m-one", "m-two"];

/// The first release, and what replaces it.
const RELEASES: [&str; 2] = ["lab1", "lab2"];

fn pools(count: u32) -> String {
    format!(
        "[[pools]]\nname = \"{MINE}\"\nkind = \"vhost-user\"\ncount = {count}\n\
         network = \"{MINE}\"\nsocket = {{ owner = 1000, group = 1000, mode = \"0660\" }}\n\
         companion = {{ bridge = \"k8sbr0\" }}\n"
    )
}

/// Copies the files to the node; what is not named by `changes` is as in the repository.
fn copy(node: &Node, changes: &[(&str, String)]) -> Result<()> {
    let to = node.path(DIR);
    fs::create_dir_all(&to)?;
    for entry in fs::read_dir(workspace().join("manifests/node"))? {
        let entry = entry?;
        let name = entry.file_name();
        let changed = changes.iter().find(|(n, _)| name == *n);
        let text = match changed {
            Some((_, text)) => text.clone(),
            None => fs::read_to_string(entry.path())?,
        };
        fs::write(to.join(name), text)?;
    }
    Ok(())
}

/// The overlay as it stands, beside what it is over.
fn copy_overlay(node: &Node) -> Result<()> {
    let to = node.path(OVERLAY);
    fs::create_dir_all(&to)?;
    for entry in fs::read_dir(workspace().join("manifests/node-process"))? {
        let entry = entry?;
        fs::copy(entry.path(), to.join(entry.file_name()))?;
    }
    Ok(())
}

/// How an administrator names the image of a release.
#[derive(Debug, Clone, Copy)]
enum Named<'a> {
    Tag(&'a str),
    Digest(&'a str),
}

/// Writes image, pools and chain where the README says.
fn customise(node: &Node, release: Named<'_>, count: u32, chain: bool) -> Result<()> {
    let text = fs::read_to_string(workspace().join("manifests/node/kustomization.yaml"))?;
    let version = match release {
        Named::Tag(tag) => format!("newTag: {tag}"),
        Named::Digest(digest) => format!("digest: {digest}"),
    };
    let name = format!("newName: {IMAGE}");
    let mut changed = 0;
    let lines = text.lines().map(|line| {
        let new = [("    newName: ", &name), ("    newTag: ", &version)]
            .into_iter()
            .find(|(key, _)| line.starts_with(key));
        changed += usize::from(new.is_some());
        new.map_or_else(|| format!("{line}\n"), |(_, value)| format!("    {value}\n"))
    });
    let kustomization: String = lines.collect();
    ensure!(changed == 2, "kustomization.yaml has no image to set");
    let mut config = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": CONFIG, "namespace": NAMESPACE},
        "data": {"config.toml": pools(count)},
    });
    if chain && let Some(data) = config.get_mut("data").and_then(Value::as_object_mut) {
        data.insert(
            "cni.conflist".into(),
            plane::network(node, "1.0.0", Some(ours::CHAINED)).into(),
        );
    }
    copy_overlay(node)?;
    copy(node, &[("kustomization.yaml", kustomization), ("config.yaml", config.to_string())])
}

/// The programs of a release: those that the node began with, and the plugin as it is shipped. A
/// later one differs by what no loader reads.
fn programs(bench: &Bench<'_>, release: &str) -> Result<Vec<(PathBuf, &'static str)>> {
    let plugin =
        static_programs(bench.cache, Profile::Release, &["vhost-rdma-cni"], &["vhost-rdma-cni"])?;
    let plugin = plugin.into_iter().next().context("one program was asked for")?;
    let stage = bench.node.lab().join("release");
    fs::create_dir_all(&stage)?;
    let mut all = Vec::new();
    for (from, name) in [
        (bench.node.path("/usr/bin").join(ours::DAEMON), ours::DAEMON),
        (bench.node.path("/usr/bin").join(ours::AGENT), ours::AGENT),
        (bench.node.path("/usr/bin").join(ours::CONTROLLER), ours::CONTROLLER),
        (plugin, "vhost-rdma-cni"),
    ] {
        let mut bytes = fs::read(&from).with_context(|| from.display().to_string())?;
        bytes.extend_from_slice(release.as_bytes());
        let to = stage.join(name);
        fs::write(&to, bytes)?;
        all.push((to, name));
    }
    Ok(all)
}

/// Makes an image after `Containerfile` and puts it into the node's containerd.
pub(crate) fn import(bench: &Bench<'_>, release: &str) -> Result<()> {
    let mut image = Image::on_root(&parts::image_root(bench.cache)?)
        .entry(&["/usr/local/bin/vhost-rdma-agent"])
        .file(&workspace().join("manifests/node/install-cni"), "usr/local/bin/install-cni");
    for (program, name) in programs(bench, release)? {
        image = image.file(&program, &format!("usr/local/bin/{name}"));
    }
    for library in libraries(bench)? {
        let name = library.file_name().unwrap_or_default().to_string_lossy().into_owned();
        image = image.file(&library, &format!("usr/local/lib/vhost-rdma/{name}"));
    }
    image.import(bench.node, &format!("{IMAGE}:{release}"))
}

/// The digest of a release's image. The node's containerd is asked for it by that name from now on,
/// as it is after it has fetched an image by its digest.
fn digest(bench: &Bench<'_>, release: &str) -> Result<String> {
    let tag = format!("{IMAGE}:{release}");
    let listed =
        bench.node.run(&["ctr", "-n", "k8s.io", "images", "list", &format!("name=={tag}")])?;
    let digest = listed.split_whitespace().find(|word| word.starts_with("sha256:"));
    let digest = digest.with_context(|| format!("no digest of {tag}:\n{listed}"))?;
    let name = format!("{IMAGE}@{digest}");
    bench.node.run(&["ctr", "-n", "k8s.io", "images", "tag", "--force", &tag, &name])?;
    Ok(digest.to_owned())
}

/// Every container of the parts that were replaced is of the image with this digest.
fn pinned(bench: &Bench<'_>, pods: &[String], digest: &str) -> Result<()> {
    let wanted = format!("{IMAGE}@{digest}");
    for pod in pods {
        let pod = bench.pods.kubectl.get(&["pod", pod, "-n", NAMESPACE])?;
        let containers = pod.pointer("/spec/containers").and_then(Value::as_array).cloned();
        let images: Vec<Value> =
            containers.into_iter().flatten().map(|mut one| one["image"].take()).collect();
        let all = images.iter().all(|image| image.as_str() == Some(&wanted));
        ensure!(!images.is_empty() && all, "{images:?} are not {wanted}");
    }
    Ok(())
}

/// The libraries of NICs for processes, as they are built.
fn libraries(bench: &Bench<'_>) -> Result<Vec<PathBuf>> {
    let dir = fs::read_dir(products::libraries(bench.cache)?)?;
    Ok(dir.flatten().map(|entry| entry.path()).collect())
}

/// Those of the image are on the node, each whole, and nothing else is there.
fn libraries_are_there(bench: &Bench<'_>) -> Result<()> {
    let wanted = libraries(bench)?;
    for library in &wanted {
        let at = bench.node.path(LIBRARIES).join(library.file_name().unwrap_or_default());
        let same = fs::read(&at).with_context(|| at.display().to_string())? == fs::read(library)?;
        ensure!(same, "{} is not the image's", at.display());
    }
    let there = fs::read_dir(bench.node.path(LIBRARIES))?.count();
    ensure!(there == wanted.len(), "{there} files in {LIBRARIES}, {} in the image", wanted.len());
    Ok(())
}

/// Waits for the one pod of each DaemonSet, all of it ready, of this release; the pods' names.
fn ready(bench: &Bench<'_>, sets: &[(&str, &str)]) -> Result<Vec<String>> {
    let kubectl = bench.pods.kubectl;
    let outcome = wait_for("the DaemonSets' pods to be ready", WAIT, || {
        std::thread::sleep(Duration::from_millis(300));
        let mut names = Vec::new();
        for (set, release) in sets {
            let label = format!("app.kubernetes.io/name={set}");
            let list = kubectl.get(&["pods", "-n", NAMESPACE, "-l", &label])?;
            let Some([pod]) = list.get("items").and_then(Value::as_array).map(Vec::as_slice) else {
                return Ok(None);
            };
            let image = format!("{IMAGE}:{release}");
            let containers = pod.pointer("/status/containerStatuses").and_then(Value::as_array);
            let good = containers.is_some_and(|all| {
                all.iter().all(|c| {
                    c.get("ready") == Some(&true.into())
                        && c.get("image").and_then(Value::as_str) == Some(&image)
                })
            });
            if !good || pod.pointer("/metadata/deletionTimestamp").is_some() {
                return Ok(None);
            }
            names.push(
                pod.pointer("/metadata/name")
                    .and_then(Value::as_str)
                    .unwrap_or_default()
                    .to_owned(),
            );
        }
        Ok(Some(names))
    });
    outcome.with_context(|| tell(bench))
}

/// All three, of one release.
fn all_of(release: &str) -> [(&str, &str); 3] {
    [(DAEMON, release), (AGENT, release), (CNI, release)]
}

/// What a person would look at.
pub(crate) fn tell(bench: &Bench<'_>) -> String {
    let one = |args: &[&str]| bench.pods.kubectl.run(args).unwrap_or_else(|e| format!("{e:#}"));
    let mut all = one(&["get", "pods,events", "-n", NAMESPACE, "-o", "wide"]);
    for container in ["cni-binary", "daemon", "agent", "cni-config", "undo"] {
        let log = one(&["logs", "-n", NAMESPACE, "-l", LABEL, "-c", container, "--tail=15"]);
        all.push_str(&format!("{container}:\n{log}\n"));
    }
    all
}

/// The API server takes the files as they are, and nothing but the namespace comes of it.
pub(crate) fn checked(bench: &mut Bench<'_>) -> Result<()> {
    copy(bench.node, &[])?;
    let kubectl = bench.pods.kubectl;
    kubectl.run(&["apply", "-f", &format!("{DIR}/namespace.yaml")])?;
    let said = kubectl.run(&["apply", "-k", DIR, "--dry-run=server"])?;
    for kind in ["namespace", "serviceaccount", "clusterrole.", "clusterrolebinding.", "configmap"]
        .iter()
        .chain(&["daemonset.apps"])
    {
        let told = said.lines().any(|l| l.starts_with(kind) && l.ends_with("(server dry run)"));
        ensure!(told, "nothing about a {kind}:\n{said}");
    }
    let made = kubectl.run(&["get", "daemonsets,configmaps", "-n", NAMESPACE, "-o", "name"])?;
    ensure!(!made.contains("vhost-rdma"), "the dry run made {made}");
    all_rendered(bench)?;
    rnic_checked(bench)
}

/// The kustomizations of `manifests`, by their directories.
pub(crate) fn kustomizations() -> Result<Vec<String>> {
    let root = workspace().join("manifests");
    let mut found = Vec::new();
    let mut dirs = vec![root.clone()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.ends_with("kustomization.yaml") {
                found.push(dir.strip_prefix(&root)?.display().to_string());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// This old `kubectl` renders each directory.
fn all_rendered(bench: &Bench<'_>) -> Result<()> {
    let all = kustomizations()?;
    ensure!(all.len() >= 13, "there are {all:?} only");
    for dir in &all {
        cluster::copy(dir, bench.node)?;
    }
    for dir in &all {
        let path = format!("{}/{dir}", cluster::DIR);
        let text = bench.pods.kubectl.run(&["kustomize", &path])?;
        let objects = text.split("\n---\n").filter(|object| object.contains("kind: "));
        let whole = objects.clone().all(|object| object.contains("apiVersion: "));
        ensure!(whole && objects.count() >= 1, "{dir} makes:\n{text}");
    }
    Ok(())
}

/// The overlay for nodes with RNICs, whole; this server knows no CEL.
fn rnic_checked(bench: &Bench<'_>) -> Result<()> {
    let dir = format!("{}/cluster-rnic", cluster::DIR);
    let path = bench.node.path(&dir).join("kustomization.yaml");
    let text = fs::read_to_string(&path)?;
    let (with, without) = ("../crds/base", "../crds/no-cel");
    ensure!(text.contains(with), "it takes no {with}: {text}");
    fs::write(&path, text.replace(with, without))?;
    let said = bench.pods.kubectl.run(&["apply", "-k", &dir, "--dry-run=server"])?;
    for object in [
        "customresourcedefinition.apiextensions.k8s.io/rdmanodes.vhost-rdma.io",
        "daemonset.apps/vhost-rdma-daemon",
        "daemonset.apps/vhost-rdma-agent",
        "deployment.apps/vhost-rdma-controller",
    ] {
        let told = |l: &str| l.starts_with(object) && l.ends_with("(server dry run)");
        ensure!(said.lines().any(told), "nothing about {object}:\n{said}");
    }
    let taken = said.lines().all(|line| line.ends_with("(server dry run)"));
    ensure!(taken, "not everything is taken:\n{said}");
    Ok(())
}

/// The node as it was before anything of ours came.
pub(crate) fn clear(bench: &mut Bench<'_>) -> Result<()> {
    let pair: Vec<String> = bench.pair.drain(..).map(|p| p.name).collect();
    let names: Vec<&str> = pair.iter().map(String::as_str).collect();
    if !names.is_empty() {
        bench.pods.kubectl.delete_pods(&names)?;
    }
    bench.consistent(&[])?;
    for server in [ours::AGENT, ours::DAEMON] {
        bench.node.kill(server, "TERM")?;
    }
    plane::write_network(bench.node, "0.4.0", None)?;
    bench.node.sh(&format!("rm -rf {LEFT_BY_HAND} /etc/vhost-rdma-agent")).map(drop)
}

/// What docs/KUBERNETES.md §5 removes by hand.
pub(crate) const LEFT_BY_HAND: &str = "/opt/cni/bin/vhost-rdma-cni /run/vhost-rdma \
                                       /run/vhost-rdma-agent /var/lib/vhost-rdma-agent \
                                       /usr/lib/vhost-rdma";

pub(crate) fn installed(bench: &mut Bench<'_>) -> Result<()> {
    import(bench, RELEASES[0])?;
    clear(bench)?;
    customise(bench.node, Named::Tag(RELEASES[0]), 4, true)?;
    let kubectl = bench.pods.kubectl;
    let refused = rights::refused(bench)?;
    kubectl.run(&["apply", "-k", OVERLAY])?;
    let pods = ready(bench, &all_of(RELEASES[0]))?;
    let agent = pods.get(1).context("an agent's pod")?;
    wait_for("the CNI configuration", WAIT, || Ok(bench.node.path(CHAIN).exists().then_some(())))?;
    bench.offered(MINE, 4)?;
    bench.offered(FORMER, 0)?;
    plugin_is(bench, RELEASES[0])?;
    libraries_are_there(bench)?;
    let users = [
        bench.pods.start(&Wanted::new(USERS[0], MINE))?,
        bench.pods.start(&Wanted::new(USERS[1], MINE))?,
    ];
    works(bench, &users)?;
    reloads(bench)?;
    dies(bench, &users)?;
    rights::of_the_account(bench, agent)?;
    rights::of_each_part(bench)?;
    ensure!(
        rights::refused(bench)? == refused,
        "the API server refused something about events or nodes"
    );
    Ok(())
}

/// The plugin on the node is that of this release, whole, and nothing half done lies beside it.
fn plugin_is(bench: &Bench<'_>, release: &str) -> Result<u64> {
    let at = bench.node.path(PLUGIN);
    let found = fs::read(&at)?;
    ensure!(
        found == fs::read(bench.node.lab().join("release/vhost-rdma-cni"))?,
        "{PLUGIN} is another"
    );
    ensure!(found.ends_with(release.as_bytes()), "{PLUGIN} is not of {release}");
    let metadata = fs::metadata(&at)?;
    ensure!(metadata.mode() & 0o7777 == 0o755, "{PLUGIN} has mode {:o}", metadata.mode());
    let left = bench.node.sh("ls -A /opt/cni/bin /etc/cni/net.d | grep '[.]new$' || true")?;
    ensure!(left.trim().is_empty(), "left of a rename: {left}");
    Ok(metadata.ino())
}

/// Each with its tap, RDMA between them, and everybody agrees who has what.
fn works(bench: &Bench<'_>, users: &[Pod]) -> Result<()> {
    for pod in users {
        let owner = format!("/sys/class/net/vr-{}/owner", pod.id);
        let owner = bench.pods.kubectl.run(&["exec", &pod.name, "--", "/bin/cat", &owner])?;
        ensure!(owner.trim() == "1000", "the tap of {} belongs to {owner}", pod.name);
    }
    let [a, b] = users else { bail!("two pods were wanted") };
    bench.counted(a, b)?;
    bench.consistent(users)
}

/// A changed ConfigMap reaches the agent and, by it, the kubelet; an Event says so.
fn reloads(bench: &Bench<'_>) -> Result<()> {
    customise(bench.node, Named::Tag(RELEASES[0]), 6, true)?;
    bench.pods.kubectl.run(&["apply", "-k", OVERLAY])?;
    bench.offered(MINE, 6)?;
    bench.pods.kubectl.wait_event("ConfigurationLoaded", "node1").map(drop)
}

/// The daemon is killed, and the process 1 that keeps its sessions goes on: so do the guests'
/// connections, over which they start their devices again. Then all of the container is killed: it
/// starts again, and the guests come back.
fn dies(bench: &Bench<'_>, users: &[Pod]) -> Result<()> {
    let identities =
        || users.iter().map(|p| restarts::identity(bench, p)).collect::<Result<Vec<_>>>();
    let before = identities()?;
    let restarts = || {
        let path = "jsonpath={.items[*].status.containerStatuses[*].restartCount}";
        let label = format!("app.kubernetes.io/name={DAEMON}");
        bench.pods.kubectl.run(&["get", "pods", "-n", NAMESPACE, "-l", &label, "-o", path])
    };
    let calm = restarts()?;
    let killed = [("vhost-rdma serve", (1, 2)), ("vhost-rdma keep", (2, 1))];
    for (what, (session, life)) in killed {
        bench.node.sh(&format!("kill -KILL $(pgrep -of '{what}')"))?;
        for pod in users {
            bench.pods.wait_life(pod, session, life)?;
        }
        if life > 1 {
            ensure!(restarts()? == calm, "the container was started again");
        }
        let after = identities()?;
        ensure!(before == after, "identities changed: {before:?}, {after:?}");
        ready(bench, &all_of(RELEASES[0]))?;
        works(bench, users)?;
    }
    bench.pods.kubectl.wait_event("DaemonBack", "node1").map(drop)
}

/// A new release, by its digest: agent and CNI plugin are replaced by themselves, while two pods
/// transfer without a pause, and no NIC notices; the daemon when the operator deletes its pod, and
/// pods keep their NICs.
pub(crate) fn upgraded(bench: &mut Bench<'_>) -> Result<()> {
    let users = USERS.map(|name| bench.pods.look(name, Some(MINE)));
    let [a, b] = users;
    let users = [a?, b?];
    let old = plugin_is(bench, RELEASES[0])?;
    let identities = |bench: &Bench<'_>| {
        users.iter().map(|p| restarts::identity(bench, p)).collect::<Result<Vec<_>>>()
    };
    let sessions = |bench: &Bench<'_>| {
        let number = |p| Ok(bench.pods.session(p)?.context("the session is gone")?.number);
        users.iter().map(number).collect::<Result<Vec<u64>>>()
    };
    let (before, connected) = (identities(bench)?, sessions(bench)?);
    import(bench, RELEASES[1])?;
    let digest = digest(bench, RELEASES[1])?;
    customise(bench.node, Named::Digest(&digest), 6, true)?;
    let kubectl = bench.pods.kubectl;
    let begun = Instant::now();
    let replaced = [(DAEMON, RELEASES[0]), (AGENT, RELEASES[1]), (CNI, RELEASES[1])];
    let (pods, transfers) = rollout::under_traffic(bench.pods, [&users[0], &users[1]], || {
        kubectl.run(&["apply", "-k", OVERLAY])?;
        ready(bench, &replaced)
    })?;
    eprintln!(
        "    agent and plugin were replaced in {:.1} s, {transfers} transfers, none failed",
        begun.elapsed().as_secs_f64()
    );
    pinned(bench, pods.get(1..).unwrap_or_default(), &digest)?;
    ensure!(plugin_is(bench, RELEASES[1])? != old, "the plugin was written over, not replaced");
    ensure!(bench.node.path(CHAIN).exists(), "the chain went with the old release");
    ensure!(sessions(bench)? == connected, "an upgrade of the agent cost a guest its session");
    works(bench, &users)?;
    // Whatever becomes of the agent, pods without a NIC start.
    let agent = pods.get(1).context("an agent's pod")?;
    kubectl.run(&["delete", "pod", agent, "-n", NAMESPACE, "--grace-period=0", "--force"])?;
    bench.pods.start(&Wanted { name: "plain", pool: None, args: &[], huge: false, plain: None })?;
    kubectl.delete_pods(&["plain"])?;
    let pods = ready(bench, &replaced)?;
    ensure!(sessions(bench)? == connected, "an agent's end cost a guest its session");
    let daemon = pods.first().context("a daemon's pod")?;
    kubectl.run(&["delete", "pod", daemon, "-n", NAMESPACE, "--wait=false"])?;
    ready(bench, &all_of(RELEASES[1]))?;
    for (pod, session) in users.iter().zip(connected) {
        bench.pods.wait_session(pod, session + 1)?;
    }
    let after = identities(bench)?;
    ensure!(before == after, "identities changed: {before:?}, {after:?}");
    works(bench, &users)?;
    bench.offered(MINE, 6)?;
    let new = bench.pods.start(&Wanted::new("m-new", MINE))?;
    bench.counted(&new, &users[0])?;
    kubectl.delete_pods(&["m-new"])
}

/// As docs/KUBERNETES.md §5 has it; then nothing of ours is on the node or in the cluster, and pods
/// start as before.
pub(crate) fn uninstalled(bench: &mut Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    kubectl.delete_pods(&USERS)?;
    bench.consistent(&[])?;
    // Without its key the chain goes, while the plugin is still there.
    customise(bench.node, Named::Tag(RELEASES[1]), 6, false)?;
    kubectl.run(&["apply", "-k", OVERLAY])?;
    wait_for("the CNI configuration to go", WAIT, || {
        Ok((!bench.node.path(CHAIN).exists()).then_some(()))
    })?;
    kubectl.run(&["delete", "-k", OVERLAY, "--wait=false"])?;
    kubectl.wait_gone(&["namespace", NAMESPACE])?;
    for program in ["vhost-rdma", "vhost-rdma-agen", "install-cni"] {
        let alive = bench.node.sh(&format!("pgrep -x {program} || true"))?;
        ensure!(alive.trim().is_empty(), "{program} lives: {alive}");
    }
    let left = kubectl.run(&["get", "clusterroles,clusterrolebindings", "-o", "name"])?;
    ensure!(!left.contains("vhost-rdma"), "left in the cluster: {left}");
    bench.node.sh(&format!("rm -rf {LEFT_BY_HAND}"))?;
    // The administrator's programs of this test and what kubectl remembers of the server's kinds,
    // containerd's copies of images and what kubelet keeps of a pod's output for a while are not
    // the DaemonSet's.
    let left = bench.node.sh(
        "find / \\( -path /proc -o -path /sys -o -path /lab -o -path /root/.kube \
         -o -path /var/lib/containerd -o -path /var/log -o -path '/tmp/*' \\) -prune -o \
         -name '*vhost*rdma*' -print 2>/dev/null | grep -v '^/usr/bin/' || true
ip -o link | grep -o ' vr-[^:@]*' || true",
    )?;
    ensure!(left.trim().is_empty(), "left on the node: {left}");
    bench.offered(MINE, 0)?;
    bench.pods.start(&Wanted { name: "plain", pool: None, args: &[], huge: false, plain: None })?;
    kubectl.delete_pods(&["plain"])?;
    // A node without RDMA devices has none of this; in this node's `/dev` it is the machine's.
    let _ = fs::remove_dir("/dev/infiniband");
    plane::healthy(bench.node)
}
