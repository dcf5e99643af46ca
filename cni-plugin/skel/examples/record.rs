//! A plugin that attaches nothing and writes down how it was called.
//!
//! Put it where a runtime looks for plugins and name a file in its configuration; each call becomes
//! one line of JSON in it, the `CNI_` variables and standard input as they came:
//!
//! ```json
//! { "cniVersion": "1.0.0", "name": "probe", "type": "record", "record": "/tmp/calls.jsonl" }
//! ```
//!
//! In a chain it hands `prevResult` through; alone it answers with the interface that it was asked
//! for, which does not exist. So it shows what a runtime, or a plugin that delegates such as
//! Multus, really says, and its files can be replayed against a real plugin.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use cni_skel::{AddResult, Answer, Attachment, Code, Error, Interface, Network, Plugin};
use serde::{Deserialize, Serialize};

#[derive(Serialize)]
struct Call {
    environment: BTreeMap<String, String>,
    /// Text and not JSON: the order of its keys is part of what came.
    stdin: String,
}

#[derive(Deserialize)]
struct Own {
    record: PathBuf,
}

struct Record;

impl Record {
    fn write(&self, network: &Network) -> Result<(), Error> {
        let Own { record } = network.config.own()?;
        let text = |os: &std::ffi::OsStr| os.to_string_lossy().into_owned();
        let environment =
            network.environment.iter().map(|(name, value)| (text(name), text(value))).collect();
        let stdin = String::from_utf8_lossy(&network.stdin).into_owned();
        append(&record, &Call { environment, stdin }).map_err(|error| {
            Error::new(Code::IO, format!("cannot record in {}: {error}", record.display()))
        })
    }
}

/// One line in one write: calls of several containers do not mix.
fn append(path: &Path, call: &Call) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(call)?;
    line.push(b'\n');
    OpenOptions::new().create(true).append(true).open(path)?.write_all(&line)
}

impl Plugin for Record {
    fn add(&self, network: &Network, attachment: &Attachment) -> Result<Answer, Error> {
        self.write(network)?;
        Ok(Answer::passed_through(network).unwrap_or_else(|| {
            let sandbox = attachment.netns.as_ref().map(|path| path.display().to_string());
            let interface =
                Interface { name: attachment.ifname.clone(), sandbox, ..Interface::default() };
            AddResult { interfaces: vec![interface], ..AddResult::default() }.into()
        }))
    }

    fn del(&self, network: &Network, _: &Attachment) -> Result<(), Error> {
        self.write(network)
    }

    fn check(&self, network: &Network, _: &Attachment) -> Result<(), Error> {
        self.write(network)
    }

    fn gc(&self, network: &Network, _: &[cni_skel::ValidAttachment]) -> Result<(), Error> {
        self.write(network)
    }

    fn status(&self, network: &Network) -> Result<(), Error> {
        self.write(network)
    }
}

fn main() -> ExitCode {
    cni_skel::run(&Record)
}
