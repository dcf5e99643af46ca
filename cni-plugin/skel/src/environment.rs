//! The variables of a call.
//!
//! Which one a command needs is the table of the specification, section 2: more than that is never
//! demanded, for a runtime that follows the specification may leave it out. A variable that is set
//! to nothing counts as left out; runtimes do that with `CNI_NETNS` when the namespace is gone.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use crate::args::Args;
use crate::{Code, Error};

/// What the runtime asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Command {
    /// Add the container to the network.
    Add,
    /// Remove it.
    Del,
    /// See that it is as ADD left it.
    Check,
    /// Remove what belongs to no attachment that is listed.
    Gc,
    /// Say whether ADD can be served.
    Status,
    /// Say which versions are spoken.
    Version,
}

impl Command {
    const ALL: [Self; 6] =
        [Self::Add, Self::Del, Self::Check, Self::Gc, Self::Status, Self::Version];

    /// As it stands in `CNI_COMMAND`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
            Self::Status => "STATUS",
            Self::Version => "VERSION",
        }
    }
}

/// The environment of a call: the process's, or a test's.
#[derive(Debug, Clone, Default)]
pub struct Environment(BTreeMap<OsString, OsString>);

impl Environment {
    /// The `CNI_` variables of this process.
    #[must_use]
    pub fn of_process() -> Self {
        std::env::vars_os().filter(|(name, _)| is_cni(name)).collect()
    }

    /// All variables that are set.
    pub fn iter(&self) -> impl Iterator<Item = (&OsStr, &OsStr)> {
        self.0.iter().map(|(name, value)| (name.as_os_str(), value.as_os_str()))
    }

    /// A variable that is set to something.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&OsStr> {
        self.0.get(OsStr::new(name)).map(OsString::as_os_str).filter(|value| !value.is_empty())
    }

    /// The command.
    ///
    /// # Errors
    /// Code 4.
    pub fn command(&self) -> Result<Command, Error> {
        let given = self.get("CNI_COMMAND").ok_or_else(|| missing(&["CNI_COMMAND"]))?;
        Command::ALL.into_iter().find(|command| given == command.as_str()).ok_or_else(|| {
            bad(
                "CNI_COMMAND",
                given,
                "it is none of ADD, DEL, CHECK, GC, STATUS, VERSION (in capitals)",
            )
        })
    }

    /// The directories of `CNI_PATH`, in order; empty if it is not set.
    #[must_use]
    pub fn path(&self) -> Vec<PathBuf> {
        let path = self.get("CNI_PATH").unwrap_or_default();
        std::env::split_paths(path).filter(|dir| !dir.as_os_str().is_empty()).collect()
    }

    /// What ADD, DEL and CHECK are about.
    ///
    /// # Errors
    /// Code 4, with the names of all that is missing, or of what is bad and why.
    pub(crate) fn attachment(&self, command: Command) -> Result<Attachment, Error> {
        let netns_needed = command != Command::Del;
        let needed = ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"];
        let absent: Vec<&str> = needed
            .into_iter()
            .filter(|name| self.get(name).is_none() && (netns_needed || *name != "CNI_NETNS"))
            .collect();
        if !absent.is_empty() {
            return Err(missing(&absent));
        }
        Ok(Attachment {
            container_id: self.text("CNI_CONTAINERID", check_container_id)?,
            netns: self.get("CNI_NETNS").map(PathBuf::from),
            ifname: self.text("CNI_IFNAME", check_ifname)?,
            args: self.args(command)?,
        })
    }

    fn text(
        &self,
        name: &'static str,
        check: fn(&str) -> Result<(), &'static str>,
    ) -> Result<String, Error> {
        let given = self.get(name).unwrap_or_default();
        let text = given.to_str().ok_or_else(|| bad(name, given, "it is not UTF-8"))?;
        check(text).map_err(|why| bad(name, given, why))?;
        Ok(text.to_owned())
    }

    fn args(&self, command: Command) -> Result<Args, Error> {
        let given = self.get("CNI_ARGS").unwrap_or_default();
        if command == Command::Del {
            return Ok(Args::parse_lossy(&given.to_string_lossy()));
        }
        Args::parse(given.to_str().ok_or_else(|| bad("CNI_ARGS", given, "it is not UTF-8"))?)
    }
}

impl<N: Into<OsString>, V: Into<OsString>> FromIterator<(N, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(pairs: I) -> Self {
        Self(pairs.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}

impl<N: Into<OsString>, V: Into<OsString>, const COUNT: usize> From<[(N, V); COUNT]>
    for Environment
{
    fn from(pairs: [(N, V); COUNT]) -> Self {
        pairs.into_iter().collect()
    }
}

/// The container and interface that ADD, DEL and CHECK are about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// The container; never empty, `[A-Za-z0-9][A-Za-z0-9_.-]*`.
    pub container_id: String,
    /// Path of its network namespace; always there for ADD and CHECK, for DEL only if the runtime
    /// still has it.
    pub netns: Option<PathBuf>,
    /// The interface that the runtime wants; a valid name.
    pub ifname: String,
    /// The arguments.
    pub args: Args,
}

impl Attachment {
    /// The namespace's path for ADD and CHECK.
    ///
    /// # Errors
    /// Code 4; cannot happen in ADD and CHECK.
    pub fn netns(&self) -> Result<&Path, Error> {
        self.netns.as_deref().ok_or_else(|| missing(&["CNI_NETNS"]))
    }
}

/// Which names Linux gives an interface (`dev_valid_name`), as the specification repeats it; a
/// colon is ifconfig's alias.
pub(crate) fn check_ifname(name: &str) -> Result<(), &'static str> {
    if name.len() > 15 {
        return Err("it is longer than 15 bytes");
    }
    if matches!(name, "." | "..") {
        return Err("it is a directory's name");
    }
    if name.contains(|c: char| c == '/' || c == ':' || c == '\0' || c.is_whitespace()) {
        return Err("it holds '/', ':' or white space");
    }
    Ok(())
}

/// Whether Linux would take this for an interface's name.
#[must_use]
pub fn valid_ifname(name: &str) -> bool {
    !name.is_empty() && check_ifname(name).is_ok()
}

/// `[A-Za-z0-9][A-Za-z0-9_.-]*`, for container identifiers and network names.
pub(crate) fn check_container_id(name: &str) -> Result<(), &'static str> {
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return Err("it does not begin with a letter or digit");
    }
    if !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b)) {
        return Err("it holds other characters than letters, digits, '_', '.' and '-'");
    }
    Ok(())
}

fn is_cni(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b"CNI_")
}

pub(crate) fn missing(names: &[&str]) -> Error {
    let verb = if names.len() == 1 { "is" } else { "are" };
    Error::new(Code::INVALID_ENVIRONMENT, format!("{} {verb} missing", names.join(", ")))
}

fn bad(name: &str, value: &OsStr, why: &str) -> Error {
    let msg = format!("{name}={:?}: {why}", value.to_string_lossy());
    Error::new(Code::INVALID_ENVIRONMENT, msg)
}
