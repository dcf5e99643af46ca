//! From a call to an answer.

use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Value, json};

use crate::config::{NetworkConfig, ValidAttachment};
use crate::environment::{Attachment, Command, Environment};
use crate::result::AddResult;
use crate::version::Version;
use crate::{Code, Error};

/// The most that is read of a configuration. A list of valid attachments of a node with thousands
/// of pods is far below.
const MOST_INPUT: u64 = 16 << 20;

/// What a plugin does. Every method gets input that is checked as far as the specification says
/// what is right.
pub trait Plugin {
    /// Adds the container to the network.
    ///
    /// # Errors
    /// What the call answers; nothing of the attempt may remain.
    fn add(&self, network: &Network, attachment: &Attachment) -> Result<Answer, Error>;

    /// Removes it. What is already gone is no error; the namespace may be gone, and the call may
    /// come again.
    ///
    /// # Errors
    /// What the call answers; the runtime tries again.
    fn del(&self, network: &Network, attachment: &Attachment) -> Result<(), Error>;

    /// Sees that it is as ADD left it; `prevResult` is there.
    ///
    /// # Errors
    /// What is wrong.
    fn check(&self, network: &Network, attachment: &Attachment) -> Result<(), Error>;

    /// Removes what belongs to no attachment in the list, as much as it can.
    ///
    /// # Errors
    /// What could not be removed.
    fn gc(&self, _network: &Network, _valid: &[ValidAttachment]) -> Result<(), Error> {
        Ok(())
    }

    /// Whether ADD can be served.
    ///
    /// # Errors
    /// Codes 50 and 51.
    fn status(&self, _network: &Network) -> Result<(), Error> {
        Ok(())
    }

    /// The versions that it speaks.
    fn versions(&self) -> &[Version] {
        Version::ALL
    }
}

/// The network that a call is about, and with which words it came.
#[derive(Debug, Clone)]
pub struct Network {
    /// The version of the conversation.
    pub version: Version,
    /// The configuration.
    pub config: NetworkConfig,
    /// `CNI_PATH`: where delegates are; empty if it was not set.
    pub path: Vec<PathBuf>,
    /// The variables, for delegates.
    pub environment: Environment,
    /// The configuration as it came, for delegates.
    pub stdin: Vec<u8>,
}

/// What ADD answers.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Answer {
    /// A result of this plugin's.
    Result(AddResult),
    /// A result of another plugin, handed through as it came.
    Untouched(Value),
}

impl Answer {
    /// `prevResult`, untouched. `None` if there is none.
    #[must_use]
    pub fn passed_through(network: &Network) -> Option<Self> {
        network.config.raw_prev_result.clone().map(Self::Untouched)
    }

    fn into_json(self, version: Version) -> Result<Value, Error> {
        match self {
            Self::Result(result) => Ok(result.to_json(version)),
            // Runtimes convert between the plugins of a chain; one that did not gets its own
            // version.
            Self::Untouched(value) => match value.get("cniVersion").and_then(Value::as_str) {
                Some(said) if said == version.as_str() => Ok(value),
                _ => Ok(AddResult::from_json(&value, version)
                    .map_err(|error| error.during("prevResult"))?
                    .to_json(version)),
            },
        }
    }
}

impl From<AddResult> for Answer {
    fn from(result: AddResult) -> Self {
        Self::Result(result)
    }
}

/// Serves the one call that this process was started for.
pub fn run(plugin: &impl Plugin) -> ExitCode {
    let environment = Environment::of_process();
    let status =
        run_with(plugin, &environment, &mut std::io::stdin().lock(), &mut std::io::stdout());
    ExitCode::from(status)
}

/// Serves one call: the exit status is 0, or 1 with an error document on `stdout`.
pub fn run_with(
    plugin: &impl Plugin,
    environment: &Environment,
    stdin: &mut dyn Read,
    stdout: &mut dyn Write,
) -> u8 {
    // Someone who tries the program in a shell has no input for it: nothing is read before it is
    // clear that it is a call.
    let input = environment.command().map(|command| (command, read(stdin)));
    let said = input.as_ref().ok().and_then(|(_, input)| said_version(input.as_ref().ok()?));
    let served = catch_unwind(AssertUnwindSafe(|| {
        let (command, input) = input?;
        if command == Command::Version {
            return Ok(Some(versions(plugin, said.as_deref())));
        }
        serve(plugin, environment, command, input)
    }))
    .unwrap_or_else(|_| Err(Error::new(Code::INTERNAL, "the plugin failed; see its stderr")));
    let (status, document) = match served {
        Ok(document) => (0, document),
        Err(error) => {
            let newest = plugin.versions().last().copied().unwrap_or(Version::NEWEST);
            (1, Some(error.to_json(said.as_deref().unwrap_or(newest.as_str()))))
        }
    };
    let Some(document) = document else { return status };
    match writeln!(stdout, "{document}").and_then(|()| stdout.flush()) {
        Ok(()) => status,
        Err(_) => 1,
    }
}

fn read(stdin: &mut dyn Read) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    stdin.take(MOST_INPUT + 1).read_to_end(&mut bytes).map_err(|error| {
        Error::new(Code::IO, format!("the network configuration cannot be read: {error}"))
    })?;
    if bytes.len() as u64 > MOST_INPUT {
        let msg = format!("the network configuration is longer than {MOST_INPUT} bytes");
        return Err(Error::new(Code::IO, msg));
    }
    Ok(bytes)
}

/// The caller's version, whether or not we speak it: it is echoed in every document.
fn said_version(input: &[u8]) -> Option<String> {
    let document: Value = serde_json::from_slice(input).ok()?;
    document.get("cniVersion").and_then(Value::as_str).map(str::to_owned)
}

fn versions(plugin: &impl Plugin, said: Option<&str>) -> Value {
    let supported: Vec<&str> = plugin.versions().iter().map(|version| version.as_str()).collect();
    let newest = supported.last().copied().unwrap_or_default();
    json!({ "cniVersion": said.unwrap_or(newest), "supportedVersions": supported })
}

fn serve(
    plugin: &impl Plugin,
    environment: &Environment,
    command: Command,
    input: Result<Vec<u8>, Error>,
) -> Result<Option<Value>, Error> {
    let attachment = match command {
        Command::Add | Command::Del | Command::Check => Some(environment.attachment(command)?),
        Command::Gc | Command::Status | Command::Version => None,
    };
    let stdin = input?;
    let config = NetworkConfig::parse(&stdin)?;
    let version = speak(plugin, command, config.document().get("cniVersion"))?;
    config.validate()?;
    let path = environment.path();
    let network = Network { version, config, path, environment: environment.clone(), stdin };
    match (command, attachment) {
        (Command::Add, Some(attachment)) => {
            refuse_own_netns(environment, attachment.netns()?)?;
            plugin.add(&network, &attachment)?.into_json(version).map(Some)
        }
        (Command::Del, Some(mut attachment)) => {
            // A path by process number can come to name our own namespace; then the container's is
            // gone.
            attachment.netns =
                attachment.netns.filter(|netns| refuse_own_netns(environment, netns).is_ok());
            plugin.del(&network, &attachment).map(|()| None)
        }
        (Command::Check, Some(attachment)) => {
            if network.config.raw_prev_result.is_none() {
                return Err(Error::new(Code::INVALID_CONFIG, "CHECK needs prevResult"));
            }
            plugin.check(&network, &attachment).map(|()| None)
        }
        (Command::Gc, _) => {
            let valid = network.config.valid_attachments.as_deref().ok_or_else(|| {
                let msg = "GC needs cni.dev/valid-attachments; nothing was removed";
                Error::new(Code::INVALID_CONFIG, msg)
            })?;
            plugin.gc(&network, valid).map(|()| None)
        }
        _ => plugin.status(&network).map(|()| None),
    }
}

/// The version of the conversation: the caller's, if we speak it and it has the command.
fn speak(plugin: &impl Plugin, command: Command, said: Option<&Value>) -> Result<Version, Error> {
    let incompatible = |msg: String| {
        let supported: Vec<&str> = plugin.versions().iter().map(|v| v.as_str()).collect();
        let details = format!("supported are {}", supported.join(", "));
        Error::new(Code::INCOMPATIBLE_VERSION, msg).details(details)
    };
    let said = match said {
        None | Some(Value::Null) => {
            return Err(incompatible("the configuration has no cniVersion".to_owned()));
        }
        Some(Value::String(said)) => said,
        Some(other) => {
            return Err(Error::new(Code::DECODING, format!("cniVersion is no string: {other}")));
        }
    };
    let version = said.parse::<Version>().ok().filter(|v| plugin.versions().contains(v));
    let version =
        version.ok_or_else(|| incompatible(format!("cniVersion {said:?} is not supported")))?;
    let since = match command {
        Command::Check => Version::V0_4_0,
        Command::Gc | Command::Status => Version::V1_1_0,
        Command::Add | Command::Del | Command::Version => Version::V0_3_0,
    };
    if version < since {
        let command = command.as_str();
        return Err(incompatible(format!("{command} came with {since}, cniVersion is {version}")));
    }
    Ok(version)
}

/// A container is not where its plugins run: such a path is a mistake that would reconfigure the
/// host. libcni's skeleton refuses it likewise, with the same way out.
fn refuse_own_netns(environment: &Environment, netns: &Path) -> Result<(), Error> {
    let allowed = environment
        .get("CNI_NETNS_OVERRIDE")
        .is_some_and(|value| value == "1" || value.eq_ignore_ascii_case("true"));
    let id = |path: &Path| path.metadata().map(|m| (m.dev(), m.ino())).ok();
    match (id(netns), id(Path::new("/proc/thread-self/ns/net"))) {
        (Some(theirs), Some(ours)) if theirs == ours && !allowed => {
            let msg = format!("CNI_NETNS={netns:?} is the plugin's own network namespace");
            Err(Error::new(Code::INVALID_NETNS, msg))
        }
        _ => Ok(()),
    }
}
