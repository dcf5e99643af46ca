//! `cargo xtask k8s definitions`: `manifests/crds/base`, with its CEL rules, on the API server of a
//! Kubernetes that knows CEL.
//!
//! No Debian release has a whole Kubernetes newer than the one of `parts`, but Debian sid has the
//! library that serves custom resources in each of them (`k8s.io/apiextensions-apiserver`), with
//! its `main.go`: the code that takes definitions, works out what their rules cost, prunes,
//! defaults, merges and validates is the real one. It has no core types, so no controller and no
//! pod runs on it; what else only newer servers have is held against their types elsewhere
//! (`controller/tests/admission.rs`). Go, library and etcd are sid's packages, unpacked and not
//! installed. sid moves: one day this set may not compile, and then that is what this says.
//!
//! What is asked of the server is `controller/api/examples/defined.rs`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::cache::Cache;
use crate::exec::{capture, run_logged, tied, wait_for, workspace};
use crate::host::{self, Archive};
use crate::k8s::cluster;
use crate::k8s::kubectl::Kubectl;
use crate::k8s::node::{Life, Node};
use crate::k8s::parts;
use crate::k8s::plane;
use crate::k8s::test::Bench;
use crate::roots::{Recipe, mmdebstrap, owned};
use crate::rows::{self, Row};

const SUITE: &str = "sid";
const LIBRARY: &str = "golang-k8s-apiextensions-apiserver-dev";
const PACKAGES: &[&str] = &[LIBRARY, "etcd-server", "golang-go"];
const SERVER: &str = "apiextensions-apiserver";
const BUILD_WAIT: Duration = Duration::from_secs(3000);
const CARGO_WAIT: Duration = Duration::from_secs(1200);
const WAIT: Duration = Duration::from_secs(120);
const RUN_WAIT: Duration = Duration::from_secs(300);

/// `$1` the root with Go and the library, `$2` an empty directory. Go's programs are static, so
/// they run where the rest of that root would not.
const BUILD: &str = r#"
go=$(ls -d "$1"/usr/lib/go-1.* | sort -V | tail -n 1)
mkdir -p "$2/home" "$2/bin"
cd "$2"
export GOROOT=$go GOPATH=$1/usr/share/gocode HOME=$2/home GOCACHE=$2/gocache
export GO111MODULE=off GOTOOLCHAIN=local GOFLAGS= GOPROXY=off CGO_ENABLED=0
"$go/bin/go" build -trimpath -ldflags '-s -w' -o "$2/bin/" k8s.io/apiextensions-apiserver
cp "$1/usr/bin/etcd" "$2/bin/"
"#;

/// It asks nobody who may do what: there is nobody to ask, and that is not what is looked at.
const OPTIONS: &[&str] = &[
    "--etcd-servers=http://127.0.0.1:2379",
    "--bind-address=127.0.0.1",
    "--secure-port=6443",
    "--tls-cert-file=/lab/pki/apiserver.crt",
    "--tls-private-key-file=/lab/pki/apiserver.key",
    "--client-ca-file=/lab/pki/ca.crt",
    "--kubeconfig=/lab/pki/admin.kubeconfig",
    "--authentication-kubeconfig=/lab/pki/admin.kubeconfig",
    "--authorization-kubeconfig=/lab/pki/admin.kubeconfig",
    "--authentication-skip-lookup=true",
    "--authorization-always-allow-paths=/*",
    "--enable-priority-and-fairness=false",
    "--disable-admission-plugins=NamespaceLifecycle,MutatingAdmissionWebhook,\
     ValidatingAdmissionWebhook,ValidatingAdmissionPolicy,MutatingAdmissionPolicy",
];

#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
}

impl Args {
    pub(crate) fn run(&self, cache: &Cache) -> Result<bool> {
        host::ensure_tools(cache)?;
        let rows = held(cache)?;
        rows::print_table(&rows, "", "");
        if let Some(path) = &self.json {
            rows::write_json(path, &rows)?;
        }
        Ok(rows.iter().all(|row| row.ok))
    }
}

/// A step of `k8s test --full`.
pub(crate) fn step(bench: &mut Bench<'_>) -> Result<()> {
    let rows = held(bench.cache)?;
    let bad: Vec<&str> = rows.iter().filter(|row| !row.ok).map(|row| row.name.as_str()).collect();
    ensure!(bad.is_empty(), "{}", bad.join("; "));
    eprintln!("    {} rows on a server that knows CEL", rows.len());
    Ok(())
}

/// The directory with server and etcd, built if need be.
fn server(cache: &Cache) -> Result<PathBuf> {
    let archive = Archive::open(cache, &[SUITE])?;
    // What is looked at is these; an update of any of the three hundred others costs nobody five
    // minutes.
    let counts = ["golang-k8s-", "golang-cel-", "etcd-server ", "golang-go "];
    let mut inputs = format!("1\n{BUILD}\n");
    for line in archive.resolve(PACKAGES).context("what sid has does not fit together today")? {
        if counts.iter().any(|start| line.starts_with(start)) {
            inputs.push_str(&format!("{line}\n"));
        }
    }
    let name = "k8s-definitions-server";
    if !cache.has(name, &inputs) && archive.renew(cache)? {
        return server(cache);
    }
    let dir = cache.artefact(name, &inputs, |tmp| {
        let (root, work) = (tmp.join("root"), tmp.join("work"));
        let log = cache.log(name);
        let packages = owned(PACKAGES);
        let recipe = Recipe { name, suite: SUITE, variant: "extract", packages: &packages };
        mmdebstrap(cache, &archive, &recipe, &root)?;
        let mut cmd = tied("sh");
        cmd.args(["-ec", BUILD, "sh"]).arg(&root).arg(&work);
        run_logged(&mut cmd, "building an API server that knows CEL (4 minutes)", &log, BUILD_WAIT)
            .with_context(|| format!("{LIBRARY} of {SUITE} does not compile today"))?;
        fs::rename(work.join("bin"), tmp.join("bin"))?;
        for scrap in [&work, &root] {
            fs::remove_dir_all(scrap)
                .with_context(|| format!("cannot remove {}", scrap.display()))?;
        }
        Ok(())
    })?;
    Ok(dir.join("bin"))
}

/// The program that asks.
fn program(cache: &Cache) -> Result<PathBuf> {
    let mut cmd = tied(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cmd.current_dir(workspace()).args(["build", "--locked", "-p", "vhost-rdma-cluster-api"]);
    cmd.args(["--example", "defined"]);
    let log = cache.log("k8s-definitions-build");
    run_logged(&mut cmd, "building what asks the API server", &log, CARGO_WAIT)?;
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace().join("target"), PathBuf::from);
    let path = target.join("debug/examples/defined");
    path.canonicalize().with_context(|| path.display().to_string())
}

fn held(cache: &Cache) -> Result<Vec<Row>> {
    let (server, program) = (server(cache)?, program(cache)?);
    let name = format!("{}-definitions", std::process::id());
    let node = Node::start(&name, &parts::node_root(cache)?, Life::Ours)?;
    let result = ask(&node, &server, &program);
    let shown = if result.is_err() { super::keep_logs(&node) } else { String::new() };
    let ended = node.end();
    let rows = result.context(shown)?;
    ended?;
    Ok(rows)
}

/// What the program says of one thing.
#[derive(Debug, Deserialize)]
struct Said {
    name: String,
    ok: bool,
    said: String,
}

fn ask(node: &Node, server: &Path, program: &Path) -> Result<Vec<Row>> {
    let bin = node.lab().join("bin");
    fs::create_dir_all(&bin)?;
    for from in [server.join(SERVER), server.join("etcd"), program.to_path_buf()] {
        let to = bin.join(from.file_name().unwrap_or_default());
        fs::copy(&from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    }
    plane::start_store(node, "/lab/bin/etcd")?;
    let server = format!("/lab/bin/{SERVER}");
    let command: Vec<&str> =
        std::iter::once(server.as_str()).chain(OPTIONS.iter().copied()).collect();
    node.spawn(SERVER, &command)?;
    wait_for("the API server", WAIT, || {
        node.check_alive(SERVER)?;
        std::thread::sleep(Duration::from_millis(100));
        // Among what it would wait for is a list of Services, which nobody has here.
        Ok(Kubectl::new(node).run(&["get", "--raw", "/readyz?exclude=informer-sync"]).ok())
    })?;
    cluster::copy("crds/base", node)?;
    let mut cmd = node.command("/lab/bin/defined");
    cmd.arg(format!("{}/crds/base", cluster::DIR));
    cmd.env("KUBECONFIG", "/lab/pki/admin.kubeconfig");
    let text = capture(&mut cmd, RUN_WAIT)?;
    let mut rows = Vec::new();
    for line in text.lines() {
        let Said { name, ok, said } =
            serde_json::from_str(line).with_context(|| format!("it says {line:?}"))?;
        if !ok {
            eprintln!("    {name}: {said}");
        }
        rows.push(Row::verdict(name, ok));
    }
    ensure!(rows.len() > 60, "it says little: {} rows", rows.len());
    Ok(rows)
}
