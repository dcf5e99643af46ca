//! What the installed parts may do: the agent's account in the cluster, and each program on its
//! node.

use anyhow::{Result, ensure};

use super::NAMESPACE;
use crate::k8s::test::Bench;

const ACCOUNT: &str = "--as=system:serviceaccount:vhost-rdma:vhost-rdma-agent";

/// The account may do what the agent does, which is in the log and the Events above, and nothing
/// else.
pub(super) fn of_the_account(bench: &Bench<'_>, pod: &str) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let log = kubectl.run(&["logs", "-n", NAMESPACE, pod, "-c", "agent"])?;
    ensure!(log.contains("v1.20.2"), "the agent did not learn the kubelet's version:\n{log}");
    let table = kubectl.run(&["auth", "can-i", "--list", "--no-headers", ACCOUNT])?;
    let mut may: Vec<String> = Vec::new();
    for line in table.lines() {
        let (Some(what), Some(verbs)) = (line.split_whitespace().next(), line.rsplit_once('['))
        else {
            continue;
        };
        // Every account may look at what the server is and ask what it may do itself.
        if !what.starts_with('[') && !what.starts_with("selfsubject") {
            may.push(format!("{what} {}", verbs.1.trim_end_matches(']')));
        }
    }
    may.sort();
    ensure!(
        may == ["events.events.k8s.io create patch", "nodes get"],
        "the account may {may:?}:\n{table}"
    );
    Ok(())
}

/// How often the API server said no to somebody who asked about Events or nodes.
pub(super) fn refused(bench: &Bench<'_>) -> Result<Vec<String>> {
    let page = bench.pods.kubectl.run(&["get", "--raw", "/metrics"])?;
    let about = |l: &str| l.contains("resource=\"events\"") || l.contains("resource=\"nodes\"");
    Ok(page
        .lines()
        .filter(|l| {
            l.starts_with("apiserver_request_total{") && l.contains("code=\"403\"") && about(l)
        })
        .map(ToOwned::to_owned)
        .collect())
}

/// What each part runs with, as its kernel sees it: capabilities, seccomp, and the network
/// namespace of the node or not.
pub(super) fn of_each_part(bench: &Bench<'_>) -> Result<()> {
    // linux/capability.h: CHOWN 0, DAC_OVERRIDE 1, FOWNER 3, NET_ADMIN 12, SYS_ADMIN 21.
    let parts = [
        ("vhost-rdma serve", 1_u64 | 1 << 1 | 1 << 3, false),
        ("vhost-rdma-agent serve", 0, false),
        ("vhost-rdma-agent undo", 1 << 12 | 1 << 21, true),
        ("install-cni keep", 0, true),
    ];
    let host = bench.node.sh("readlink /proc/self/ns/net")?;
    for (name, capabilities, in_host) in parts {
        let script = format!(
            "p=$(pgrep -of '{name}'); grep -E '^(CapEff|CapBnd|Seccomp):' /proc/$p/status; \
             readlink /proc/$p/ns/net"
        );
        let said = bench.node.sh(&script)?;
        let field =
            |key: &str| said.lines().find_map(|l| l.strip_prefix(key)).map(|v| v.trim().to_owned());
        for key in ["CapEff:", "CapBnd:"] {
            let has = field(key).and_then(|v| u64::from_str_radix(&v, 16).ok());
            ensure!(has == Some(capabilities), "{name} has {key} {has:x?}, not {capabilities:x}");
        }
        ensure!(field("Seccomp:").as_deref() == Some("2"), "{name} is not filtered:\n{said}");
        let hosts = said.lines().last() == Some(host.trim());
        ensure!(hosts == in_host, "{name} in the node's network namespace: {hosts}");
    }
    Ok(())
}
