//! Alerts and the dashboard: what is checked in is what is generated, each alert is played, and
//! each metric that they name is one that a program of ours has.
//!
//! The dashboard is a list of panels here, since the form of Grafana says little in many lines.
//! Alerts are written by hand (`manifests/monitoring/rules.yaml`) and played by Prometheus' own
//! `promtool`, which comes from Debian.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::cache::Cache;
use crate::exec::{capture, tied, workspace};
use crate::host::Archive;
use crate::roots::{Recipe, mmdebstrap, owned};

const WAIT: Duration = Duration::from_secs(120);
/// What the names of all our metrics begin with.
const PREFIX: &str = "vhost_rdma_";

/// A panel: title, unit, and for each line an expression and a legend.
type Panel = (&'static str, &'static str, &'static [(&'static str, &'static str)]);

const ROWS: &[(&str, &[Panel])] = &[
    (
        "Cluster",
        &[
            (
                "NICs that pods have",
                "short",
                &[("sum by (pool) (vhost_rdma_agent_pool_granted)", "{{pool}}")],
            ),
            (
                "NICs that are left",
                "short",
                &[("sum by (pool) (vhost_rdma_agent_pool_free)", "{{pool}}")],
            ),
            (
                "IDs that cannot be used",
                "short",
                &[(
                    "sum by (pool) (vhost_rdma_agent_pool_devices - vhost_rdma_agent_pool_healthy)",
                    "{{pool}}",
                )],
            ),
        ],
    ),
    (
        "Traffic",
        &[
            (
                "Bytes by network",
                "Bps",
                &[
                    (
                        "sum by (network) (rate(vhost_rdma_nic_tx_bytes_total[5m]))",
                        "{{network}} sent",
                    ),
                    (
                        "sum by (network) (rate(vhost_rdma_nic_rx_bytes_total[5m]))",
                        "{{network}} received",
                    ),
                ],
            ),
            (
                "Messages by network",
                "ops",
                &[
                    (
                        "sum by (network) (rate(vhost_rdma_nic_tx_messages_total[5m]))",
                        "{{network}} sent",
                    ),
                    (
                        "sum by (network) (rate(vhost_rdma_nic_rx_messages_total[5m]))",
                        "{{network}} received",
                    ),
                ],
            ),
            (
                "Refused and tried again",
                "ops",
                &[
                    (
                        "sum by (network) (rate(vhost_rdma_nic_access_errors_total[5m]))",
                        "{{network}} access errors",
                    ),
                    (
                        "sum by (network) (rate(vhost_rdma_nic_retries_total[5m]))",
                        "{{network}} retries",
                    ),
                    (
                        "sum by (network) (rate(vhost_rdma_nic_rnr_naks_total[5m]))",
                        "{{network}} receiver not ready",
                    ),
                ],
            ),
        ],
    ),
    (
        "Limits",
        &[
            (
                "Registered memory, the ten NICs nearest to their limit",
                "percentunit",
                &[(
                    "topk(10, vhost_rdma_nic_mr_bytes / (vhost_rdma_nic_mr_bytes_limit > 0))",
                    "{{nic}}",
                )],
            ),
            (
                "Queue pairs, the ten NICs nearest to their limit",
                "percentunit",
                &[("topk(10, vhost_rdma_nic_qps / (vhost_rdma_nic_qps_limit > 0))", "{{nic}}")],
            ),
            (
                "Kept memory, the ten NICs nearest to their limit",
                "percentunit",
                &[(
                    "topk(10, vhost_rdma_nic_kept_bytes / (vhost_rdma_nic_kept_bytes_limit > 0))",
                    "{{nic}}",
                )],
            ),
        ],
    ),
    (
        "Faults",
        &[
            (
                "Network processes that died",
                "short",
                &[(
                    "sum by (instance, network) (increase(vhost_rdma_process_deaths_total[1h]))",
                    "{{instance}} {{network}}",
                )],
            ),
            (
                "Devices that stopped",
                "short",
                &[("sum by (instance) (vhost_rdma_nic_failed)", "{{instance}}")],
            ),
            (
                "Longest present turn of a worker",
                "s",
                &[("max by (instance) (vhost_rdma_worker_stalled_seconds)", "{{instance}}")],
            ),
        ],
    ),
    (
        "Controller",
        &[
            (
                "Writes",
                "ops",
                &[(
                    "sum by (write, outcome) (rate(vhost_rdma_controller_writes_total[5m]))",
                    "{{write}} {{outcome}}",
                )],
            ),
            ("Objects that wait", "short", &[("max(vhost_rdma_controller_waiting)", "waiting")]),
            (
                "Pods asked about",
                "ops",
                &[(
                    "sum by (verdict) (rate(vhost_rdma_controller_admissions_total[5m]))",
                    "{{verdict}}",
                )],
            ),
            (
                "Agents that follow peers",
                "short",
                &[("sum(vhost_rdma_controller_peers_clients)", "agents")],
            ),
            (
                "What they are told",
                "ops",
                &[(
                    "sum by (form) (rate(vhost_rdma_controller_peers_updates_total[5m]))",
                    "{{form}}",
                )],
            ),
            (
                "Days until the channel's root ends",
                "d",
                &[(
                    "(max(vhost_rdma_controller_root_expiry_timestamp_seconds) - time()) / 86400",
                    "root",
                )],
            ),
        ],
    ),
];

fn dir() -> PathBuf {
    workspace().join("manifests/monitoring")
}

/// The dashboard, as Grafana reads it.
fn dashboard() -> Value {
    let source = json!({"type": "prometheus", "uid": "${source}"});
    let (mut panels, mut y, mut id) = (Vec::new(), 0, 0);
    for (title, of_row) in ROWS {
        id += 1;
        panels.push(json!({
            "id": id, "type": "row", "title": title, "collapsed": false, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
        }));
        y += 1;
        for (n, (title, unit, lines)) in of_row.iter().enumerate() {
            id += 1;
            let targets: Vec<Value> = lines
                .iter()
                .enumerate()
                .map(|(n, (expr, legend))| {
                    let name = char::from(b'A' + u8::try_from(n).unwrap_or(25));
                    json!({
                        "refId": name.to_string(), "datasource": source, "expr": expr,
                        "legendFormat": legend,
                    })
                })
                .collect();
            panels.push(json!({
                "id": id, "type": "timeseries", "title": title, "datasource": source,
                "gridPos": {"x": n % 3 * 8, "y": y + n / 3 * 8, "w": 8, "h": 8},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
                "targets": targets,
            }));
        }
        y += of_row.len().div_ceil(3) * 8;
    }
    json!({
        "uid": "vhost-rdma", "title": "vhost-rdma", "schemaVersion": 39, "version": 1,
        "editable": true, "tags": ["vhost-rdma", "rdma"], "refresh": "1m",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [
            {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"},
        ]},
        "panels": panels,
    })
}

fn dashboard_text() -> Result<String> {
    Ok(serde_json::to_string_pretty(&dashboard())? + "\n")
}

/// Writes the dashboard anew.
pub fn write_dashboard() -> Result<bool> {
    fs::write(dir().join("dashboard.json"), dashboard_text()?)?;
    Ok(true)
}

/// The groups of alerts, as Prometheus reads them.
fn groups() -> Result<Value> {
    let text = fs::read_to_string(dir().join("rules.yaml"))?;
    let object: Value = serde_saphyr::from_str(&text).context("rules.yaml")?;
    let groups = object.pointer("/spec/groups").context("rules.yaml has no groups")?;
    Ok(json!({ "groups": groups }))
}

fn expressions() -> Result<Vec<String>> {
    let groups = groups()?;
    let rules = groups.pointer("/groups").and_then(Value::as_array).context("no groups")?;
    let of_rules = rules
        .iter()
        .filter_map(|group| group.get("rules")?.as_array())
        .flatten()
        .filter_map(|rule| rule.get("expr")?.as_str().map(str::to_owned));
    let panels = ROWS.iter().flat_map(|(_, panels)| *panels).flat_map(|(_, _, lines)| *lines);
    Ok(of_rules.chain(panels.map(|(expr, _)| (*expr).to_owned())).collect())
}

/// Every metric that an alert or a panel names.
pub(crate) fn metrics() -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for expression in expressions()? {
        let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        names.extend(words.filter(|word| word.starts_with(PREFIX)).map(str::to_owned));
    }
    Ok(names)
}

/// Plays every alert.
pub fn run(cache: &Cache) -> Result<bool> {
    let root = promtool(cache)?;
    let rules = root.join("rules");
    fs::create_dir_all(&rules)?;
    fs::write(rules.join("rules.json"), groups()?.to_string())?;
    fs::copy(dir().join("rules-test.yaml"), rules.join("rules-test.yaml"))?;
    for arguments in
        [["check", "rules", "/rules/rules.json"], ["test", "rules", "/rules/rules-test.yaml"]]
    {
        let mut cmd = tied("chroot");
        cmd.arg(&root).arg("/usr/bin/promtool").args(arguments);
        let said = capture(&mut cmd, WAIT)?;
        eprintln!("{}", said.trim_end());
    }
    Ok(true)
}

fn promtool(cache: &Cache) -> Result<PathBuf> {
    let archive = Archive::open(cache, &["bookworm"])?;
    let packages = ["prometheus"];
    let inputs = format!("1\n{}", archive.resolve(&packages)?.join("\n"));
    let name = "promtool";
    if !cache.has(name, &inputs) && archive.renew(cache)? {
        return promtool(cache);
    }
    let dir = cache.artefact(name, &inputs, |tmp| {
        let recipe =
            Recipe { name, suite: "bookworm", variant: "minbase", packages: &owned(&packages) };
        mmdebstrap(cache, &archive, &recipe, &tmp.join("root"))
    })?;
    let root = dir.join("root");
    ensure!(root.join("usr/bin/promtool").exists(), "the package has no promtool");
    Ok(root)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dashboard_is_what_is_generated() {
        let found = fs::read_to_string(dir().join("dashboard.json")).expect("a dashboard");
        assert!(found == dashboard_text().expect("text"), "run `cargo xtask dashboard`");
    }

    #[test]
    fn each_alert_is_played_and_explained() {
        let groups = groups().expect("groups").to_string();
        let tests = fs::read_to_string(dir().join("rules-test.yaml")).expect("tests");
        let manual = fs::read_to_string(workspace().join("docs/ALERTS.md")).expect("a manual");
        let names: Vec<&str> = groups
            .split("\"alert\":\"")
            .skip(1)
            .filter_map(|rest| rest.split('"').next())
            .collect();
        assert!(names.len() >= 10, "{names:?}");
        for name in names {
            let played = tests.split(&format!("alertname: {name}\n")).nth(1);
            let fires = played.is_some_and(|rest| rest.trim_start().starts_with("exp_alerts:\n"));
            assert!(fires, "{name} is never made to call");
            assert!(manual.contains(&format!("### {name}\n")), "docs/ALERTS.md lacks {name}");
        }
    }

    fn objects(file: &str) -> Vec<Value> {
        let text = fs::read_to_string(workspace().join("manifests").join(file)).expect(file);
        text.split("\n---\n").map(|text| serde_saphyr::from_str(text).expect(file)).collect()
    }

    /// Each program that has metrics is found by one monitor and once, at a port that its pods
    /// have.
    #[test]
    fn each_program_is_read_once() {
        let monitors = objects("monitoring/monitors.yaml");
        let of = |kind: &str| monitors.iter().find(|object| object["kind"] == kind).expect(kind);
        let parts = ["node/agent.yaml", "node/daemon.yaml", "controller/controller.yaml"];
        let names = of("PodMonitor")["spec"]["selector"]["matchExpressions"][0]["values"].clone();
        let of_service = &of("ServiceMonitor")["spec"];
        let mut read = 0;
        for object in parts.iter().flat_map(|file| objects(file)) {
            let Some(pod) = object.pointer("/spec/template") else { continue };
            let name = &pod["metadata"]["labels"]["app.kubernetes.io/name"];
            let has = |port: &Value| {
                let all = pod.pointer("/spec/containers").and_then(Value::as_array).expect("some");
                let ports = all.iter().filter_map(|c| c.get("ports")?.as_array()).flatten();
                ports.filter(|found| found["name"] == *port).count()
            };
            let by_pod = if names.as_array().expect("names").contains(name) {
                let ends = of("PodMonitor")["spec"]["podMetricsEndpoints"].clone();
                ends.as_array().expect("ports").iter().map(|end| has(&end["port"])).sum()
            } else {
                0
            };
            let by_service = usize::from(
                of_service["selector"]["matchLabels"]["app.kubernetes.io/name"] == *name,
            );
            assert_eq!(by_pod + by_service, 1, "{name} is read so often");
            read += 1;
        }
        assert_eq!(read, 3);
        let service = &objects("controller/service.yaml")[0];
        let port = &of_service["endpoints"][0]["port"];
        let ports = service["spec"]["ports"].as_array().expect("ports");
        assert!(ports.iter().any(|found| found["name"] == *port), "no {port}");
        let label = &of_service["selector"]["matchLabels"]["app.kubernetes.io/name"];
        assert_eq!(service["metadata"]["labels"]["app.kubernetes.io/name"], *label);
    }

    #[test]
    fn metrics_are_found_in_expressions() {
        let names = metrics().expect("names");
        assert!(names.contains("vhost_rdma_process_failing"), "{names:?}");
        assert!(names.contains("vhost_rdma_nic_tx_bytes_total"), "{names:?}");
        assert!(names.iter().all(|name| !name.ends_with('_')), "{names:?}");
    }
}
