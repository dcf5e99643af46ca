//! A set of peers in a file, as `peer list --json` prints one.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::Deserialize;
use vhost_rdma_proto::v1;

use super::Failure;

/// Bytes of a file: more than the daemon takes at once.
const FILE_MAX: u64 = 64 << 20;

/// A peer of the file. What a listing says besides has no meaning here.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Peer {
    address: String,
    #[serde(default)]
    through: String,
    #[serde(default)]
    daemon: String,
    #[serde(default)]
    network: String,
    #[serde(default, rename = "source")]
    _source: String,
}

/// The set in a file, or in standard input for `-`.
pub(super) fn read(path: &Path) -> Result<Vec<v1::Peer>, Failure> {
    let shown = path.display();
    let fault = |source| Failure::Io { action: format!("read {shown}"), source };
    let input: Box<dyn Read> = if path.as_os_str() == "-" {
        Box::new(io::stdin().lock())
    } else {
        Box::new(File::open(path).map_err(fault)?)
    };
    let mut text = Vec::new();
    input.take(FILE_MAX + 1).read_to_end(&mut text).map_err(fault)?;
    if text.len() as u64 > FILE_MAX {
        return Err(Failure::Usage(format!("{shown} has more than {FILE_MAX} bytes")));
    }
    let peers: Vec<Peer> = serde_json::from_slice(&text).map_err(|error| {
        Failure::Usage(format!(
            "{shown} is no list of peers as `peer list --json` prints it: {error}"
        ))
    })?;
    let message = |Peer { address, through, daemon, network, .. }| v1::Peer {
        address,
        through,
        daemon,
        network,
        ..v1::Peer::default()
    };
    Ok(peers.into_iter().map(message).collect())
}
