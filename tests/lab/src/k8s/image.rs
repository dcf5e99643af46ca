//! Container images without a registry or a builder: one layer of the files that are named, as an
//! OCI layout in a tar file.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

use crate::exec::capture;
use crate::k8s::node::Node;

const DIGEST_WAIT: Duration = Duration::from_secs(300);
const LDD_WAIT: Duration = Duration::from_secs(20);
const APPLETS: &[&str] = &[
    "cat", "env", "hostname", "id", "ip", "ls", "mount", "ping", "ps", "sh", "sleep", "stat",
    "touch", "true",
];

/// What is in an image.
#[derive(Debug, Default)]
pub(crate) struct Image {
    /// Host file and its path in the image.
    files: Vec<(PathBuf, String)>,
    links: Vec<(String, String)>,
    entry: Vec<String>,
    /// A whole root file system below it all.
    root: Option<PathBuf>,
}

impl Image {
    /// An image with a busybox from the node's root.
    pub(crate) fn with_busybox(root: &Path) -> Self {
        let mut image = Self::default();
        image.files.push((root.join("usr/bin/busybox"), "bin/busybox".into()));
        image.links = APPLETS.iter().map(|a| (format!("bin/{a}"), "busybox".into())).collect();
        image
    }

    pub(crate) fn entry(mut self, entry: &[&str]) -> Self {
        self.entry = entry.iter().map(|e| (*e).to_owned()).collect();
        self
    }

    /// An image on a root file system, without what a container gets from its runtime.
    pub(crate) fn on_root(root: &Path) -> Self {
        Self { root: Some(root.to_path_buf()), ..Self::default() }
    }

    /// Adds a file as it is.
    pub(crate) fn file(mut self, from: &Path, to: &str) -> Self {
        self.files.push((from.to_path_buf(), to.to_owned()));
        self
    }

    /// Adds a program of this machine with the libraries that the loader would take for it.
    pub(crate) fn program(mut self, from: &Path, to: &str) -> Result<Self> {
        self.files.push((from.to_path_buf(), to.to_owned()));
        for library in libraries(from)? {
            let at = library.trim_start_matches('/').to_owned();
            if !self.files.iter().any(|(_, t)| *t == at) {
                self.files.push((PathBuf::from(&library), at));
            }
        }
        Ok(self)
    }

    /// Puts the image into the node's containerd under `reference`.
    pub(crate) fn import(&self, node: &Node, reference: &str) -> Result<()> {
        let name = reference.replace(['/', ':'], "-");
        let archive = node.lab().join(format!("{name}.tar"));
        self.write(reference, &archive)?;
        node.run(&["ctr", "-n", "k8s.io", "images", "import", &format!("/lab/{name}.tar")])
            .with_context(|| format!("containerd does not take the image {reference}"))?;
        fs::remove_file(archive)?;
        Ok(())
    }

    /// Writes the archive that any containerd imports under `reference`.
    pub(crate) fn write(&self, reference: &str, to: &Path) -> Result<()> {
        let layer = to.with_extension("layer");
        self.layer(File::create(&layer)?)?;
        self.archive(reference, &layer, File::create(to)?)?;
        fs::remove_file(layer)?;
        Ok(())
    }

    fn layer(&self, to: File) -> Result<()> {
        let mut tar = Builder::new(BufWriter::new(to));
        tar.follow_symlinks(false);
        // containerd knows no sparse files.
        tar.sparse(false);
        if let Some(root) = &self.root {
            for entry in fs::read_dir(root).with_context(|| root.display().to_string())? {
                let entry = entry?;
                let name = entry.file_name();
                if RUNTIMES_OWN.iter().any(|d| name == *d) {
                    continue;
                }
                if entry.file_type()?.is_dir() {
                    tar.append_dir_all(&name, entry.path())?;
                } else {
                    tar.append_path_with_name(entry.path(), &name)?;
                }
            }
        }
        let mut dirs: BTreeSet<String> = RUNTIMES_OWN.map(ToOwned::to_owned).into();
        if self.root.is_none() {
            dirs.extend(["etc", "var"].map(ToOwned::to_owned));
        }
        for (_, to) in &self.files {
            let parents = Path::new(to).ancestors().skip(1).filter_map(Path::to_str);
            let new = parents.filter(|p| {
                !p.is_empty() && self.root.as_ref().is_none_or(|r| !r.join(p).exists())
            });
            dirs.extend(new.map(ToOwned::to_owned));
        }
        for dir in dirs {
            let mode = if dir == "tmp" { 0o1777 } else { 0o755 };
            append(&mut tar, &dir, EntryType::Directory, mode, &[])?;
        }
        for (from, to) in &self.files {
            let mut file =
                File::open(from).with_context(|| format!("cannot read {}", from.display()))?;
            let mut header = header(EntryType::Regular, 0o755, file.metadata()?.len());
            tar.append_data(&mut header, to, &mut file)?;
        }
        for (at, to) in &self.links {
            let mut header = header(EntryType::Symlink, 0o777, 0);
            tar.append_link(&mut header, at, to)?;
        }
        if self.root.is_none() {
            let (kind, mode) = (EntryType::Regular, 0o644);
            append(
                &mut tar,
                "etc/passwd",
                kind,
                mode,
                b"root:x:0:0::/:/bin/sh\npod:x:1000:1000::/tmp:/bin/sh\n",
            )?;
            append(&mut tar, "etc/group", kind, mode, b"root:x:0:\npod:x:1000:\n")?;
        }
        tar.into_inner()?.flush()?;
        Ok(())
    }

    fn archive(&self, reference: &str, layer: &Path, to: File) -> Result<()> {
        let (layer_digest, layer_size) = (digest_of(layer)?, fs::metadata(layer)?.len());
        let config = json!({
            "architecture": std::env::consts::ARCH
                .replace("x86_64", "amd64")
                .replace("aarch64", "arm64"),
            "os": "linux",
            "config": {
                "Entrypoint": self.entry,
                "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
            },
            "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
            "history": [{"created_by": "xtask"}],
        })
        .to_string()
        .into_bytes();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor(
                "application/vnd.oci.image.config.v1+json", &digest(&config), config.len() as u64
            ),
            "layers": [
                descriptor("application/vnd.oci.image.layer.v1.tar", &layer_digest, layer_size)
            ],
        })
        .to_string()
        .into_bytes();
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let mut entry = descriptor(kind, &digest(&manifest), manifest.len() as u64);
        if let Some(map) = entry.as_object_mut() {
            map.insert("annotations".into(), json!({"io.containerd.image.name": reference}));
        }
        let index = json!({"schemaVersion": 2, "manifests": [entry]}).to_string();
        let mut tar = Builder::new(BufWriter::new(to));
        let file = EntryType::Regular;
        append(&mut tar, "oci-layout", file, 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        append(&mut tar, "index.json", file, 0o644, index.as_bytes())?;
        for blob in [&config, &manifest] {
            append(&mut tar, &blob_path(&digest(blob)), file, 0o644, blob)?;
        }
        let mut header = header(file, 0o644, layer_size);
        tar.append_data(&mut header, blob_path(&layer_digest), &mut File::open(layer)?)?;
        tar.into_inner()?.flush()?;
        Ok(())
    }
}

/// Mounted over by every runtime.
const RUNTIMES_OWN: [&str; 5] = ["dev", "proc", "run", "sys", "tmp"];

fn blob_path(digest: &str) -> String {
    format!("blobs/{}", digest.replace(':', "/"))
}

fn hex(bytes: &[u8]) -> String {
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}

/// By coreutils: this program is compiled without optimisation, and a layer may have a gigabyte.
fn digest_of(path: &Path) -> Result<String> {
    let text = capture(Command::new("sha256sum").arg(path), DIGEST_WAIT)?;
    let hex = text.split_whitespace().next().context("sha256sum said nothing")?;
    Ok(format!("sha256:{hex}"))
}

fn digest(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn descriptor(kind: &str, digest: &str, size: u64) -> Value {
    json!({"mediaType": kind, "digest": digest, "size": size})
}

fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

fn append(
    tar: &mut Builder<impl Write>,
    path: &str,
    kind: EntryType,
    mode: u32,
    bytes: &[u8],
) -> Result<()> {
    let mut header = header(kind, mode, bytes.len() as u64);
    tar.append_data(&mut header, path, bytes).with_context(|| format!("tar: {path}"))
}

/// The shared libraries of a program and its loader, by their absolute paths; none for a static
/// one.
fn libraries(program: &Path) -> Result<Vec<String>> {
    let Ok(text) = capture(Command::new("ldd").arg(program), LDD_WAIT) else {
        return Ok(Vec::new());
    };
    Ok(text
        .lines()
        .filter_map(|l| {
            let l = l.trim();
            let path = l.split_once(" => ").map_or(l, |(_, p)| p);
            let path = path.split(' ').next()?;
            path.starts_with('/').then(|| path.to_owned())
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_index_names_is_in_the_archive() {
        let mut image = Image::default().entry(&["/bin/x"]);
        image.files.push(("/etc/hostname".into(), "bin/x".into()));
        let dir = std::env::temp_dir().join(format!("xtask-image-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let (layer, archive) = (dir.join("layer"), dir.join("archive"));
        image.layer(File::create(&layer).unwrap()).unwrap();
        image.archive("localhost/x:lab", &layer, File::create(&archive).unwrap()).unwrap();
        let bytes = fs::read(&archive).unwrap();
        fs::remove_dir_all(&dir).unwrap();
        let mut blobs = std::collections::BTreeMap::new();
        for entry in tar::Archive::new(bytes.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            let name = entry.path().unwrap().display().to_string();
            std::io::Read::read_to_end(&mut entry, &mut content).unwrap();
            blobs.insert(name, content);
        }
        let blob = |d: &Value| {
            let bytes =
                &blobs[&format!("blobs/{}", d["digest"].as_str().unwrap().replace(':', "/"))];
            assert_eq!(digest(bytes), d["digest"].as_str().unwrap());
            assert_eq!(Value::from(bytes.len()), d["size"]);
            bytes.clone()
        };
        let index: Value = serde_json::from_slice(&blobs["index.json"]).unwrap();
        let manifest: Value = serde_json::from_slice(&blob(&index["manifests"][0])).unwrap();
        let config: Value = serde_json::from_slice(&blob(&manifest["config"])).unwrap();
        let layer = blob(&manifest["layers"][0]);
        assert_eq!(config["rootfs"]["diff_ids"][0].as_str().unwrap(), digest(&layer));
        assert_eq!(config["config"]["Entrypoint"][0], "/bin/x");
    }
}
