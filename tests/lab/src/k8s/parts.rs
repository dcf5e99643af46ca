//! What a cluster is made of: the servers, built from source, and a node's root file system.
//!
//! Debian has no binaries of the Kubernetes servers, and newer Debian releases no source of them
//! either; Debian 12's source package of 1.20.2 is the whole tree with its vendored modules, and
//! Debian 12's Go builds it without a network. It is years out of upstream support: it is here for
//! its kubelet's device manager, its CRI and its API server, and runs nowhere but in a test's own
//! namespaces. containerd 1.6 and runc come as Debian's binaries; containerd 2 no longer speaks the
//! CRI version of this kubelet.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::exec::{run_logged, tied, tied_private_mounts, workspace};
use crate::host::Archive;
use crate::roots::{Recipe, mmdebstrap, owned};

const SUITE: &str = "bookworm";
const BUILD_WAIT: Duration = Duration::from_secs(3000);
const STEP_WAIT: Duration = Duration::from_secs(120);

/// The servers, as their programs are called.
pub(crate) const SERVERS: [&str; 4] =
    ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet"];

const BUILD_PACKAGES: &[&str] = &[
    "golang-1.19-go",
    "golang-1.19-src",
    "golang-github-modern-go-reflect2-dev",
    "jq",
    "make",
    "patch",
    "rsync",
    "xz-utils",
];

/// In the builder, with the tarballs in `/work`. The tags leave out the libraries of clouds and of
/// Docker, which no server here uses and which take minutes to compile. Of the generated files that
/// the servers need, one is not in the tarball; `make generated_files` would make all the others
/// again. The vendored reflect2 1.0.1 reads Go's map iterator as it was before Go 1.18 and brings
/// the API server down with the first custom resource; Debian's own copy of 1.0.2 takes its place.
const BUILD: &str = r#"
cd /work
mkdir src bin home
tar -xf kubernetes_*.orig.tar.* -C src --strip-components=1
tar -xf kubernetes_*.debian.tar.* -C src
cd src
grep -v '^#' debian/patches/series | while read -r p rest; do
  [ -z "$p" ] || patch -p1 -s < "debian/patches/$p"
done
export GOROOT=/usr/lib/go-1.19 PATH=/usr/lib/go-1.19/bin:$PATH HOME=/work/home \
  GOCACHE=/work/gocache GOFLAGS= GOPROXY=off CGO_ENABLED=0
reflect2=vendor/github.com/modern-go/reflect2
rm -f $reflect2/*.go $reflect2/*.s
cp /usr/share/gocode/src/github.com/modern-go/reflect2/*.go \
  /usr/share/gocode/src/github.com/modern-go/reflect2/*.s $reflect2/
rm -f $reflect2/*_test.go
cat > /work/kubeversion <<END
KUBE_GIT_COMMIT='debian'
KUBE_GIT_TREE_STATE='archive'
KUBE_GIT_VERSION='v1.20.2'
KUBE_GIT_MAJOR='1'
KUBE_GIT_MINOR='20'
END
export KUBE_GIT_VERSION_FILE=/work/kubeversion GOPATH=$PWD/.go
mkdir -p .go/src/k8s.io
ln -sfn ../../.. .go/src/k8s.io/kubernetes
make gen_openapi
export GO111MODULE=off GOPATH=$PWD/_output/local/go
cd $GOPATH/src/k8s.io/kubernetes
flags="-s -w"
for p in component-base/version client-go/pkg/version; do
  p=k8s.io/kubernetes/vendor/k8s.io/$p
  flags="$flags -X $p.gitVersion=v1.20.2 -X $p.gitMajor=1 -X $p.gitMinor=20"
  flags="$flags -X $p.gitTreeState=archive"
done
go build -tags 'providerless dockerless' -ldflags "$flags" -o /work/bin/ \
  ./cmd/kube-apiserver ./cmd/kubelet ./cmd/kube-controller-manager ./cmd/kube-scheduler
"#;

/// `$1` the builder's root, `$2` what becomes its `/work`, `$3` the script.
const ENTER: &str = r#"
mount --bind "$2" "$1/work"
mount -t proc proc "$1/proc"
exec chroot "$1" sh -ec "$3"
"#;

/// What runs on the node beside the servers and what of ours is tested.
const NODE_PACKAGES: &[&str] = &[
    "busybox-static",
    "conntrack",
    "containerd",
    "containernetworking-plugins",
    "etcd-server",
    "iproute2",
    "iptables",
    "kubernetes-client",
    "mount",
    "openssl",
    "procps",
    "runc",
    "tini",
    "util-linux",
];

/// The artefacts of a cluster.
#[derive(Debug, Clone)]
pub(crate) struct Parts {
    /// The directory with the four servers.
    pub(crate) servers: PathBuf,
    /// The node's root; read only.
    pub(crate) root: PathBuf,
}

impl Parts {
    pub(crate) fn prepare(cache: &Cache) -> Result<Self> {
        Ok(Self { servers: servers(cache)?, root: node_root(cache)? })
    }
}

/// The directory with the servers, built if need be.
pub(crate) fn servers(cache: &Cache) -> Result<PathBuf> {
    let archive = Archive::open(cache, &[SUITE])?;
    let source = archive.source_files("kubernetes")?;
    // The compiler's and the library's versions count; those of make and tar do not change what
    // comes out, and would cost everyone five minutes for each of their updates.
    let mut inputs = format!("1\n{BUILD}\n");
    for line in archive.resolve(BUILD_PACKAGES)? {
        if line.starts_with("golang-") {
            inputs.push_str(&format!("{line}\n"));
        }
    }
    for file in &source {
        inputs.push_str(&format!("{} {}\n", file.name, file.checksum));
    }
    let name = "k8s-servers";
    if !cache.has(name, &inputs) && archive.renew(cache)? {
        return servers(cache);
    }
    let dir = cache.artefact(name, &inputs, |tmp| {
        let (root, work) = (tmp.join("root"), tmp.join("work"));
        let log = cache.log(name);
        mmdebstrap(
            cache,
            &archive,
            &Recipe { name, suite: SUITE, variant: "apt", packages: &owned(BUILD_PACKAGES) },
            &root,
        )?;
        fs::create_dir_all(root.join("work"))?;
        fs::create_dir_all(&work)?;
        archive.download_source(&source, &work, &log)?;
        let mut cmd = tied_private_mounts("sh");
        cmd.args(["-ec", ENTER, "sh"]).arg(&root).arg(&work).arg(BUILD);
        run_logged(&mut cmd, "building the Kubernetes servers (5 minutes)", &log, BUILD_WAIT)?;
        fs::rename(work.join("bin"), tmp.join("bin"))?;
        for scrap in [&work, &root] {
            make_writable(scrap);
            fs::remove_dir_all(scrap)
                .with_context(|| format!("cannot remove {}", scrap.display()))?;
        }
        Ok(())
    })?;
    let dir = dir.join("bin");
    for server in SERVERS {
        fs::metadata(dir.join(server)).with_context(|| format!("the build left no {server}"))?;
    }
    Ok(dir)
}

/// Go's caches are read-only directories; root may remove them all the same, others may not.
fn make_writable(dir: &Path) {
    let mut cmd = tied("chmod");
    cmd.args(["-R", "u+w"]).arg(dir);
    let _ = crate::exec::capture(&mut cmd, STEP_WAIT);
}

/// A node's root: containerd, runc, the reference CNI plugins.
pub(crate) fn node_root(cache: &Cache) -> Result<PathBuf> {
    let archive = Archive::open(cache, &[SUITE])?;
    let inputs = format!("1\n{}", archive.resolve(NODE_PACKAGES)?.join("\n"));
    let name = "k8s-node";
    if !cache.has(name, &inputs) && archive.renew(cache)? {
        return node_root(cache);
    }
    let dir = cache.artefact(name, &inputs, |tmp| {
        mmdebstrap(
            cache,
            &archive,
            &Recipe { name, suite: SUITE, variant: "minbase", packages: &owned(NODE_PACKAGES) },
            &tmp.join("root"),
        )
    })?;
    Ok(dir.join("root"))
}

/// The packages that `Containerfile` installs in the image, as it says.
fn image_packages() -> Result<Vec<String>> {
    let text = fs::read_to_string(workspace().join("manifests/node/Containerfile"))?;
    let (_, last) = text.rsplit_once("\nFROM ").context("Containerfile has one stage")?;
    let joined = last.replace("\\\n", " ");
    let (_, rest) = joined.split_once("--no-install-recommends").context("it installs nothing")?;
    let (names, _) = rest.split_once("&&").context("the list has no end")?;
    Ok(names.split_whitespace().map(ToOwned::to_owned).collect())
}

/// The root of the node parts' image: what `debian:bookworm-slim` has, and what `Containerfile`
/// adds to it.
pub(crate) fn image_root(cache: &Cache) -> Result<PathBuf> {
    let archive = Archive::open(cache, &[SUITE])?;
    let added = image_packages()?;
    let base = ["bash", "coreutils", "dash", "libc6", "libgcc-s1"];
    let packages: Vec<&str> = base.into_iter().chain(added.iter().map(String::as_str)).collect();
    let inputs = format!("1\n{}", archive.resolve(&packages)?.join("\n"));
    let name = "k8s-image";
    if !cache.has(name, &inputs) && archive.renew(cache)? {
        return image_root(cache);
    }
    let dir = cache.artefact(name, &inputs, |tmp| {
        mmdebstrap(
            cache,
            &archive,
            &Recipe { name, suite: SUITE, variant: "essential", packages: &owned(&packages) },
            &tmp.join("root"),
        )
    })?;
    Ok(dir.join("root"))
}
