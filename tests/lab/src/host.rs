//! The machine we run on: which tools it lacks, where it gets its packages from, and what a set of
//! packages resolves to.
//!
//! The mirror is the one that the machine's own apt sources name; no host is written down here.
//! Package sets are resolved by the host's apt against a private state directory with an empty dpkg
//! status, so the answer is what a fresh root would get and nothing on the machine changes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::cache::{Cache, hash};
use crate::exec::{capture, run_logged, tied};

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Ubuntu's keys, which Debian's package ubuntu-keyring has.
pub(crate) const UBUNTU_KEYRING: &str = "/usr/share/keyrings/ubuntu-archive-keyring.gpg";
/// Package lists older than this are fetched again.
const LISTS_FRESH: Duration = Duration::from_secs(12 * 3600);
/// How old they may be when something is made from them.
const LISTS_NEW: Duration = Duration::from_secs(300);
const APT_WAIT: Duration = Duration::from_secs(300);

/// A program we call, and the package that has it.
const TOOLS: &[(&str, &str)] = &[
    ("mmdebstrap", "mmdebstrap"),
    ("mke2fs", "e2fsprogs"),
    ("zstd", "zstd"),
    ("xz", "xz-utils"),
    ("cpio", "cpio"),
    ("unshare", "util-linux"),
    ("setpriv", "util-linux"),
    ("mount", "mount"),
    ("patch", "patch"),
    ("cc", "gcc"),
    ("ip", "iproute2"),
];

/// What the RNIC backing is built with. Images have these (manifests/node/Containerfile); a plain
/// build needs none of them.
pub const RNIC_PACKAGES: &[&str] =
    &["cmake", "libclang-dev", "libibverbs-dev", "make", "pkg-config", "python3"];

/// What tests start: Python plays strangers, `strace` stops the CNI plugin at each of its system
/// calls, and systemd has the unit that ships.
pub const TEST_PACKAGES: &[&str] = &["python3", "strace", "systemd"];

/// Fails with a sentence unless we are root: chroots, mounts and owners of files in an image need
/// it.
pub(crate) fn require_root() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!(
            "the VM lab makes chroots and file system images and must run as root: try `sudo -E \
             cargo xtask …`, or use `cargo xtask test --fast`, which needs no VM"
        );
    }
    Ok(())
}

/// Whether this machine is itself a VM of the lab: its processor is QEMU's own.
pub fn is_emulated() -> bool {
    fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("QEMU TCG CPU"))
}

/// What `ensure_tools`, the lints and the tests would install, and a compiler's runtime: for an
/// image of a machine on which the lab runs.
pub(crate) fn tools() -> impl Iterator<Item = &'static str> {
    let more = ["debian-archive-keyring", "git", "libc6-dev"];
    let wanted = RNIC_PACKAGES.iter().chain(TEST_PACKAGES).copied();
    TOOLS.iter().map(|(_, package)| *package).chain(more).chain(wanted)
}

fn on_path(program: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':').chain(["/usr/sbin", "/sbin"]).any(|d| Path::new(d).join(program).exists())
}

/// Installs what is missing, and says so; an error unless we are root. Whoever finds in the cache
/// what the lab makes once needs these, too.
pub(crate) fn ensure_tools(cache: &Cache) -> Result<()> {
    require_root()?;
    let mut missing: Vec<&str> =
        TOOLS.iter().filter(|(p, _)| !on_path(p)).map(|&(_, pkg)| pkg).collect();
    if !Path::new(KEYRING).exists() {
        missing.push("debian-archive-keyring");
    }
    missing.sort_unstable();
    missing.dedup();
    install(cache, &missing)
}

/// Installs those of some packages that are not there.
pub fn ensure_packages(cache: &Cache, packages: &[&str]) -> Result<()> {
    let there = |package: &&str| {
        let mut query = Command::new("dpkg-query");
        query.args(["-W", "-f", "${Status}", package]);
        query.output().is_ok_and(|out| out.stdout.ends_with(b" installed"))
    };
    let missing: Vec<&str> = packages.iter().filter(|package| !there(package)).copied().collect();
    install(cache, &missing)
}

/// `apt-get install` on this machine.
pub(crate) fn install(cache: &Cache, packages: &[&str]) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    require_root()
        .with_context(|| format!("these packages are missing: {}", packages.join(" ")))?;
    let _lock = cache.lock("host-apt")?;
    let log = cache.log("host-apt");
    eprintln!("    this machine lacks {}: installing with apt-get", packages.join(" "));
    run_logged(tied("apt-get").args(["-q", "update"]), "apt-get update", &log, APT_WAIT)?;
    let mut cmd = tied("apt-get");
    cmd.env("DEBIAN_FRONTEND", "noninteractive")
        .args(["-q", "-y", "--no-install-recommends", "install"])
        .args(packages);
    run_logged(&mut cmd, "apt-get install", &log, APT_WAIT)
}

/// The Debian mirror of this machine's apt sources (one-line and deb822 formats).
pub(crate) fn mirror() -> Result<String> {
    let mut texts = Vec::new();
    if let Ok(t) = fs::read_to_string("/etc/apt/sources.list") {
        texts.push((false, t));
    }
    let mut parts: Vec<PathBuf> = fs::read_dir("/etc/apt/sources.list.d")
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .collect();
    parts.sort();
    for p in parts {
        let deb822 = p.extension().is_some_and(|e| e == "sources");
        if deb822 || p.extension().is_some_and(|e| e == "list") {
            texts.push((deb822, fs::read_to_string(&p)?));
        }
    }
    texts
        .iter()
        .find_map(|(deb822, t)| if *deb822 { mirror_deb822(t) } else { mirror_one_line(t) })
        .context(
            "no Debian mirror in /etc/apt/sources.list or /etc/apt/sources.list.d: add a line such \
             as `deb <mirror> bookworm main`",
        )
}

/// Suites whose archive is the main Debian archive; security and third-party archives carry other
/// names.
fn debian_suite(suite: &str) -> bool {
    ["bookworm", "trixie", "forky", "sid", "stable", "testing", "unstable", "oldstable"]
        .contains(&suite)
}

fn mirror_one_line(text: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let line = line.trim().strip_prefix("deb ")?.trim_start();
        let line = if line.starts_with('[') { line.split_once(']')?.1 } else { line };
        let mut words = line.split_whitespace();
        let (uri, suite) = (words.next()?, words.next()?);
        debian_suite(suite).then(|| uri.trim_end_matches('/').to_owned())
    })
}

fn mirror_deb822(text: &str) -> Option<String> {
    text.split("\n\n").find_map(|stanza| {
        let field = |name: &str| {
            stanza.lines().find_map(|l| {
                let (k, v) = l.split_once(':')?;
                k.eq_ignore_ascii_case(name).then(|| v.trim().to_owned())
            })
        };
        if field("Enabled").is_some_and(|v| v.eq_ignore_ascii_case("no"))
            || !field("Types")?.split_whitespace().any(|t| t == "deb")
        {
            return None;
        }
        if !field("Suites")?.split_whitespace().any(debian_suite) {
            return None;
        }
        field("URIs")?.split_whitespace().next().map(|u| u.trim_end_matches('/').to_owned())
    })
}

/// Proxy settings of the machine's apt, to hand to the apt inside a new root.
pub(crate) fn apt_proxy_options() -> Vec<String> {
    let dump = capture(Command::new("apt-config").arg("dump"), Duration::from_secs(20))
        .unwrap_or_default();
    dump.lines()
        .filter(|l| l.starts_with("Acquire::http") && l.to_ascii_lowercase().contains("::proxy"))
        .map(ToOwned::to_owned)
        .collect()
}

/// A tarball of a source package.
#[derive(Debug, Clone)]
pub(crate) struct SourceFile {
    uri: String,
    pub(crate) name: String,
    pub(crate) checksum: String,
}

/// The host's apt pointed at other suites.
#[derive(Debug)]
pub(crate) struct Archive {
    pub(crate) lines: Vec<String>,
    dir: PathBuf,
    default_release: Option<String>,
}

impl Archive {
    /// `suites`, the last one preferred if it is a backports suite.
    pub(crate) fn open(cache: &Cache, suites: &[&str]) -> Result<Self> {
        let mirror = mirror()?;
        let name = suites.join("+");
        let lines: Vec<String> =
            suites.iter().map(|s| format!("deb [signed-by={KEYRING}] {mirror} {s} main")).collect();
        let default_release =
            suites.last().filter(|s| s.ends_with("-backports")).map(|s| (*s).to_owned());
        Self::read(cache, &name, lines, default_release)
    }

    /// A release of Ubuntu with its updates, which bring the newer kernels of a long-term release.
    pub(crate) fn ubuntu(cache: &Cache, mirror: &str, suite: &str, parts: &str) -> Result<Self> {
        let line =
            |suite: &str| format!("deb [signed-by={UBUNTU_KEYRING}] {mirror} {suite} {parts}");
        let lines = vec![line(suite), line(&format!("{suite}-updates"))];
        Self::read(cache, &format!("ubuntu-{suite}-{}", parts.replace(' ', "-")), lines, None)
    }

    fn read(
        cache: &Cache,
        name: &str,
        lines: Vec<String>,
        default_release: Option<String>,
    ) -> Result<Self> {
        let dir = cache.dir().join("apt").join(name);
        let archive = Self { lines, dir, default_release };
        let _lock = cache.lock(&format!("apt-{name}"))?;
        archive.refresh(cache, name, LISTS_FRESH)?;
        Ok(archive)
    }

    /// Reads the lists again before something is made from them, unless that was just done: what is
    /// fetched comes from the archive as it is now, and must be what the lists say. True if they
    /// were read, so that the caller resolves anew.
    pub(crate) fn renew(&self, cache: &Cache) -> Result<bool> {
        let name = self.dir.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
        let _lock = cache.lock(&format!("apt-{name}"))?;
        self.refresh(cache, &name, LISTS_NEW)
    }

    /// Reads the lists if they are older than `age`; whether it did.
    fn refresh(&self, cache: &Cache, name: &str, age: Duration) -> Result<bool> {
        let stamp = self.dir.join("updated");
        let sources = self
            .lines
            .iter()
            .map(|l| format!("{l}\n{}\n", l.replacen("deb ", "deb-src ", 1)))
            .collect::<String>();
        let same = fs::read_to_string(self.dir.join("sources.list")).is_ok_and(|t| t == sources);
        let fresh = fs::metadata(&stamp)
            .and_then(|m| m.modified())
            .is_ok_and(|t| t.elapsed().unwrap_or_default() < age);
        if same && fresh {
            return Ok(false);
        }
        for sub in ["lists/partial", "archives/partial"] {
            fs::create_dir_all(self.dir.join(sub))?;
        }
        fs::write(self.dir.join("status"), "")?;
        fs::write(self.dir.join("sources.list"), sources)?;
        let mut cmd = self.apt("apt-get");
        cmd.arg("update");
        match run_logged(
            &mut cmd,
            &format!("reading the package lists of {name}"),
            &cache.log("apt-lists"),
            APT_WAIT,
        ) {
            Ok(()) => fs::write(stamp, "").map(|()| true).map_err(Into::into),
            // Stale lists still resolve to something that the cache may hold: a mirror that is away
            // must not stop a warm run.
            Err(e) if stamp.exists() => {
                eprintln!("    warning: {e:#}\n    going on with the lists of an earlier run");
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    fn apt(&self, program: &str) -> Command {
        let mut cmd = tied(program);
        let set = |k: &str, v: &Path| format!("{k}={}", v.display());
        for opt in [
            set("Dir::State", &self.dir),
            set("Dir::State::Lists", &self.dir.join("lists")),
            set("Dir::State::status", &self.dir.join("status")),
            set("Dir::Cache", &self.dir),
            set("Dir::Cache::Archives", &self.dir.join("archives")),
            set("Dir::Etc::SourceList", &self.dir.join("sources.list")),
            "Dir::Etc::SourceParts=/dev/null".into(),
            "Dir::Etc::Preferences=/dev/null".into(),
            "Dir::Etc::PreferencesParts=/dev/null".into(),
            "APT::Architecture=amd64".into(),
            "APT::Architectures=amd64".into(),
            "APT::Install-Recommends=false".into(),
            "APT::Sandbox::User=root".into(),
            "APT::Update::Post-Invoke-Success=".into(),
            "Acquire::Languages=none".into(),
            "Acquire::Check-Valid-Until=false".into(),
        ] {
            cmd.arg("-o").arg(opt);
        }
        if let Some(release) = &self.default_release {
            cmd.arg("-o").arg(format!("APT::Default-Release={release}"));
        }
        cmd
    }

    /// `name version` of everything that these packages bring into an empty root.
    pub(crate) fn resolve(&self, packages: &[&str]) -> Result<Vec<String>> {
        // The answer holds as long as the lists do.
        let memo = self.dir.join(format!("resolved-{}", hash(packages.join(" ").as_bytes())));
        let time = |p: &Path| fs::metadata(p).and_then(|m| m.modified()).ok();
        if time(&memo) > time(&self.dir.join("updated"))
            && let Ok(text) = fs::read_to_string(&memo)
        {
            return Ok(text.lines().map(ToOwned::to_owned).collect());
        }
        let found = self.ask(packages)?;
        let fresh = self.dir.join(format!("resolving-{}", std::process::id()));
        fs::write(&fresh, found.join("\n"))?;
        fs::rename(&fresh, &memo)?;
        Ok(found)
    }

    fn ask(&self, packages: &[&str]) -> Result<Vec<String>> {
        let mut cmd = self.apt("apt-get");
        cmd.args(["-s", "-y", "-q", "install"]).args(packages);
        let text = capture(&mut cmd, APT_WAIT)
            .with_context(|| format!("cannot resolve {}", packages.join(" ")))?;
        let mut found: Vec<String> = text
            .lines()
            .filter_map(|l| {
                let (name, rest) = l.strip_prefix("Inst ")?.split_once(' ')?;
                let version = rest.trim_start_matches('(').split_whitespace().next()?;
                Some(format!("{name} {version}"))
            })
            .collect();
        found.sort();
        if found.is_empty() {
            bail!("apt resolved {} to nothing", packages.join(" "));
        }
        Ok(found)
    }

    /// Fetches `.deb` files into `into`.
    pub(crate) fn download(&self, packages: &[String], into: &Path, log: &Path) -> Result<()> {
        let mut cmd = self.apt("apt-get");
        cmd.current_dir(into).args(["-q", "download"]).args(packages);
        run_logged(&mut cmd, &format!("fetching {}", packages.join(" ")), log, APT_WAIT)
    }

    /// The tarballs of a source package as apt's index names them. The `.dsc` is left out: some
    /// mirrors do not carry it, and the checksums of the tarballs are in the signed index.
    pub(crate) fn source_files(&self, package: &str) -> Result<Vec<SourceFile>> {
        let mut cmd = self.apt("apt-get");
        cmd.args(["-q", "--print-uris", "source", package]);
        let text = capture(&mut cmd, APT_WAIT)
            .with_context(|| format!("cannot find the source of {package}"))?;
        let files: Vec<SourceFile> = text
            .lines()
            .filter_map(|l| {
                let mut words = l.split_whitespace();
                let uri = words.next()?.strip_prefix('\'')?.strip_suffix('\'')?.to_owned();
                let name = words.next()?.to_owned();
                let checksum = words.nth(1)?.to_owned();
                name.contains(".tar.").then_some(SourceFile { uri, name, checksum })
            })
            .collect();
        if files.is_empty() {
            bail!("the source index has no tarballs of {package}:\n{text}");
        }
        Ok(files)
    }

    /// Fetches the tarballs into `into`; apt checks their checksums.
    pub(crate) fn download_source(
        &self,
        files: &[SourceFile],
        into: &Path,
        log: &Path,
    ) -> Result<()> {
        for file in files {
            let mut cmd = self.apt("/usr/lib/apt/apt-helper");
            cmd.arg("download-file").arg(&file.uri).arg(into.join(&file.name)).arg(&file.checksum);
            run_logged(&mut cmd, &format!("fetching {}", file.name), log, APT_WAIT)?;
        }
        Ok(())
    }

    /// Options for mmdebstrap that give the new root the same view.
    pub(crate) fn mmdebstrap_options(&self) -> Vec<String> {
        let mut opts: Vec<String> = [
            "Acquire::Languages \"none\"",
            "Acquire::Check-Valid-Until \"false\"",
            "APT::Install-Recommends \"false\"",
        ]
        .iter()
        .map(|o| format!("--aptopt={o}"))
        .collect();
        if let Some(release) = &self.default_release {
            opts.push(format!("--aptopt=APT::Default-Release \"{release}\""));
        }
        opts.extend(
            apt_proxy_options()
                .into_iter()
                .map(|o| format!("--aptopt={}", o.trim_end_matches(';'))),
        );
        opts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::workspace;
    use crate::process::products::TOOLS as LIBRARIES;

    /// What follows `before`, in a text that says what is needed.
    fn told(file: &str, before: &str) -> String {
        let text = fs::read_to_string(workspace().join(file)).expect("a file of the tree");
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let (_, rest) = text.split_once(before).expect("it says so");
        let end = rest.find(". ").unwrap_or(rest.len());
        rest[..end].replace([',', ';', ':', '`'], " ")
    }

    #[test]
    fn documents_and_images_name_what_is_needed() {
        let named = |said: &str, packages: &[&str]| {
            let words: Vec<&str> = said.split_whitespace().collect();
            for package in packages {
                assert!(words.contains(package), "{package} is not in {said:?}");
            }
        };
        let compiler = ["gcc", "libc6-dev"];
        let first = told("README.md", "and the packages ");
        named(&first, &[&compiler, LIBRARIES.as_slice()].concat());
        named(&told("README.md", "as root, with Rust,"), &compiler);
        for (file, before) in [
            ("docs/RNIC.md", "To build it:"),
            ("docs/TESTING.md", "its build needs"),
            ("manifests/node/Containerfile", "--no-install-recommends "),
        ] {
            named(&told(file, before), RNIC_PACKAGES);
        }
    }

    #[test]
    fn mirror_of_both_formats() {
        let deb822 = "Types: deb\nURIs: https://third.example/x\nSuites: nodistro\n\n\
                      Types: deb deb-src\n# c\nURIs: http://m.example/debian/\n\
                      Suites: bookworm bookworm-updates\n";
        assert_eq!(mirror_deb822(deb822).as_deref(), Some("http://m.example/debian"));
        let off = "Types: deb\nEnabled: no\nURIs: http://m.example/debian\nSuites: bookworm\n";
        assert_eq!(mirror_deb822(off), None);
        let one = "# deb http://no.example/ bookworm main\n\
                   deb http://s.example/ bookworm-security main\n\
                   deb [arch=amd64 trusted=yes] http://m.example/debian/ trixie main\n";
        assert_eq!(mirror_one_line(one).as_deref(), Some("http://m.example/debian"));
    }
}
