//! What `manifests/node` promises, without a cluster: what a file can say wrongly and no server
//! would refuse. How the parts run in one is tested by
//! `cargo xtask k8s test --full --only manifests`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::path::{Path, PathBuf};

use vhost_rdma_agent::config::Config;
use vhost_rdma_agent_api::Kind;

/// What the daemon itself needs, beside guest memory that is charged to it (docs/KUBERNETES.md §3).
const OWN: u64 = 512 << 20;

fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/node")
}

fn text(name: &str) -> String {
    std::fs::read_to_string(dir().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The shipped configuration of the agent.
fn shipped() -> Config {
    let file = text("config.yaml");
    let (_, block) = file.split_once("config.toml: |\n").unwrap();
    let lines = block.lines().take_while(|line| line.is_empty() || line.starts_with("    "));
    let toml: String = lines.map(|line| format!("{}\n", line.trim_start())).collect();
    Config::parse(&toml, Path::new("config.yaml")).unwrap()
}

fn mebibytes(quantity: &str) -> u64 {
    let number = |suffix: &str| quantity.strip_suffix(suffix)?.parse::<u64>().ok();
    number("Mi").or_else(|| number("Gi").map(|gibibytes| gibibytes << 10)).unwrap()
}

/// The containers of a file, each as its lines. A container begins with `- name:` at the depth of
/// containers.
fn containers(name: &str) -> Vec<String> {
    let file = text(name);
    let mut found: Vec<String> = Vec::new();
    let mut inside = false;
    for line in file.lines() {
        if line.starts_with("      containers:") || line.starts_with("      initContainers:") {
            inside = true;
        } else if line.starts_with("      ") && !line.starts_with("       ") {
            inside = false;
        } else if inside && line.starts_with("        - name: ") {
            found.push(String::new());
        }
        if let Some(container) = found.last_mut().filter(|_| inside) {
            *container += &format!("{line}\n");
        }
    }
    assert!(!found.is_empty(), "{name} has containers");
    found
}

#[test]
fn no_pod_can_have_the_daemon_killed_by_what_it_registers() {
    let config = shipped();
    let mut guests = 0;
    for pool in config.pools.iter().filter(|pool| pool.kind == Kind::VhostUser) {
        let limits = &pool.limits;
        let bytes = limits.max_mr_bytes.expect("a shipped pool says how much may be registered");
        let kept = limits.max_kept_bytes.expect("and how much the daemon may keep for it");
        guests += u64::from(pool.count.unwrap()) * (bytes + kept);
        for limit in [limits.max_contexts, limits.max_pds, limits.max_mrs, limits.max_cqs] {
            assert!(limit.is_some());
        }
        for limit in [limits.max_srqs, limits.max_qps, limits.max_ahs] {
            assert!(limit.is_some());
        }
    }
    let daemon = containers("daemon.yaml").remove(0);
    let (_, limit) = daemon.split_once("limits: { memory: ").unwrap();
    let limit = mebibytes(limit.split_once(' ').unwrap().0) << 20;
    assert!(guests > 0 && limit >= guests + OWN, "{limit} bytes for {guests} of guests");
}

#[test]
fn every_container_has_a_memory_limit_and_what_it_needs_no_right_for_it_has_not() {
    for name in ["daemon.yaml", "agent.yaml", "cni.yaml"] {
        let file = text(name);
        assert!(file.contains("seccompProfile: { type: RuntimeDefault }"), "{name}");
        assert_eq!(file.contains("serviceAccountName"), name == "agent.yaml", "{name}");
        assert_eq!(file.contains("hostNetwork: true"), name == "cni.yaml", "{name}");
        assert!(!file.contains("/var/lib/kubelet/pods") && !file.contains("privileged"), "{name}");
        assert!(!file.contains("hostPID") && !file.contains("hostIPC"), "{name}");
        let little =
            file.contains("resources: &little") && file.contains("limits: { memory: 64Mi }");
        let nothing = file.contains("securityContext: &nothing");
        for container in containers(name) {
            let limited = container.contains("limits: { memory: ")
                || (little && container.contains("resources: *little"));
            assert!(limited, "no memory limit:\n{container}");
            let dropped = container.contains("drop: [\"ALL\"]")
                || (nothing && container.contains("securityContext: *nothing"));
            assert!(dropped, "capabilities that nobody asked for:\n{container}");
        }
    }
    let agent = containers("agent.yaml").remove(0);
    assert!(agent.contains("capabilities: { drop: [\"ALL\"] }") && !agent.contains("add:"));
}

#[test]
fn each_part_on_the_pod_network_is_reached_at_its_port_only() {
    assert!(text("kustomization.yaml").contains("  - network-policy.yaml\n"));
    let policies = text("network-policy.yaml");
    for (name, file) in [("daemon", "daemon.yaml"), ("agent", "agent.yaml")] {
        let labels = format!("matchLabels: {{ app.kubernetes.io/name: vhost-rdma-{name} }}");
        let policy = policies.split("\n---\n").find(|policy| policy.contains(&labels)).unwrap();
        let (_, port) = policy.split_once("port: ").unwrap();
        let port = port.split_whitespace().next().unwrap();
        assert_eq!(policy.matches("port: ").count(), 1, "{policy}");
        assert!(text(file).contains(&format!("containerPort: {port} }}")), "{name}: {port}");
        // What it speaks to nobody is said; an agent speaks to the API server and the controller.
        assert_eq!(policy.contains("Egress"), name == "daemon", "{policy}");
        assert!(text(file).contains(&labels), "{name}");
    }
}

#[test]
fn the_image_has_what_its_programs_load_when_they_run() {
    let file = text("Containerfile");
    let (_, image) = file.rsplit_once("\nFROM ").unwrap();
    let joined = image.replace("\\\n", " ");
    let (_, packages) = joined.split_once("--no-install-recommends").unwrap();
    let packages: Vec<&str> = packages.split("&&").next().unwrap().split_whitespace().collect();
    // libibverbs and its providers by the loader, librdmacm by `dlopen`, cmp by install-cni.
    for package in ["diffutils", "ibverbs-providers", "libibverbs1", "librdmacm1"] {
        assert!(packages.contains(&package), "{package} is not in {packages:?}");
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vhost-rdma/rnic/src/cm/library.rs");
    assert!(std::fs::read_to_string(source).unwrap().contains("librdmacm.so.1"));
}
