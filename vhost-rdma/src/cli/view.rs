//! What the command line shows: stable JSON, and tables for people.

use std::io::{self, Write as _};

use serde::Serialize;
use vhost_rdma_proto::v1;

use super::Failure;

/// A NIC; the field names are a promise to scripts.
#[derive(Debug, Serialize)]
pub(super) struct ShownNic {
    pub(super) name: String,
    pub(super) number: u32,
    pub(super) network: String,
    pub(super) vni: u32,
    pub(super) mac: String,
    pub(super) addresses: Vec<String>,
    pub(super) virtio_id: Option<u32>,
    pub(super) comp_vectors: u32,
    pub(super) num_queues: u32,
    pub(super) backing: String,
    pub(super) guests: String,
    pub(super) socket: String,
    pub(super) owner: String,
    pub(super) group: String,
    pub(super) mode: String,
    pub(super) acl: Vec<String>,
    pub(super) configured: bool,
    pub(super) session: &'static str,
    pub(super) interrupted: bool,
    pub(super) error: Option<String>,
    pub(super) limits: Limits,
    pub(super) counters: Counters,
    pub(super) objects: Objects,
    pub(super) gids: Vec<String>,
    pub(super) worker: u32,
}

/// Declares a JSON view with the fields of an API message, so that no field can be left behind.
macro_rules! mirror {
    ($name:ident from $message:path { $($field:ident: $type:ty),* $(,)? }) => {
        #[derive(Debug, Default, Serialize)]
        pub(super) struct $name {
            $(pub(super) $field: $type,)*
        }

        impl From<$message> for $name {
            fn from(message: $message) -> Self {
                let $message { $($field),* } = message;
                Self { $($field),* }
            }
        }

        impl $name {
            fn rows(&self) -> Vec<[String; 2]> {
                vec![$([stringify!($field).to_owned(), self.$field.to_string()]),*]
            }
        }
    };
}

type LimitsMessage = v1::Limits;
type CountersMessage = v1::Counters;
type ObjectsMessage = v1::Objects;
type StatusMessage = v1::GetStatusResponse;
type NetworkMessage = v1::Network;
type PeerMessage = v1::Peer;
type ReplacedMessage = v1::ReplacePeersResponse;

mirror!(Limits from LimitsMessage {
    max_contexts: u32, max_pds: u32, max_mrs: u32, max_mr_bytes: u64, max_kept_bytes: u64,
    max_guest_bytes: u64,
    max_cqs: u32, max_srqs: u32, max_qps: u32, max_ahs: u32,
});
mirror!(Counters from CountersMessage {
    tx_bytes: u64, rx_bytes: u64, tx_messages: u64, rx_messages: u64, rnr_naks: u64, retries: u64,
    access_errors: u64,
    control_commands: u64, kicks: u64, events: u64, completions: u64, page_faults: u64,
    moves: u64,
});
mirror!(Objects from ObjectsMessage {
    contexts: u32, pds: u32, mrs: u32, mr_bytes: u64, cqs: u32, srqs: u32, qps: u32, ahs: u32,
    kept_bytes: u64,
});
mirror!(Status from StatusMessage {
    version: String, pid: u32, uptime_seconds: u64, runtime_dir: String, workers: u32, poll_us: u32,
    networks: u32, nics: u32,
    nics_ready: u32, ephemeral: bool, instance: String, upgrade_pause_us: u64,
});
mirror!(Peer from PeerMessage {
    network: String, address: String, through: String, daemon: String, source: String,
});
mirror!(PeersReplaced from ReplacedMessage { added: u32, removed: u32 });
mirror!(Network from NetworkMessage {
    name: String, vni: u32, nics: u32, configured: bool, memory_bytes: u64, memory_max: u64,
    memory_kills: u64,
});

impl ShownNic {
    /// What a VMM's options need to know of it.
    pub(super) fn for_vmm(&self) -> vhost_rdma_vmm::Nic {
        vhost_rdma_vmm::Nic {
            name: self.name.clone(),
            mac: self.mac.clone(),
            socket: self.socket.clone(),
            virtio_id: self.virtio_id,
            comp_vectors: self.comp_vectors,
            num_queues: self.num_queues,
        }
    }
}

impl From<v1::Nic> for ShownNic {
    fn from(nic: v1::Nic) -> Self {
        let session = match nic.session() {
            v1::Session::Connected => "connected",
            v1::Session::DriverReady => "driver_ready",
            v1::Session::Failed => "failed",
            v1::Session::Absent => "absent",
            v1::Session::Unspecified => "unknown",
        };
        let access = nic.access.unwrap_or_default();
        Self {
            name: nic.name,
            number: nic.number,
            network: nic.network,
            vni: nic.vni,
            mac: nic.mac,
            addresses: nic.addresses,
            virtio_id: nic.virtio_id,
            comp_vectors: nic.comp_vectors,
            num_queues: nic.num_queues,
            backing: nic.backing,
            guests: nic.guests,
            socket: nic.socket,
            owner: access.owner.unwrap_or_default(),
            group: access.group.unwrap_or_default(),
            mode: format!("{:04o}", access.mode.unwrap_or_default()),
            acl: access.acl.unwrap_or_default().entries,
            configured: nic.configured,
            session,
            interrupted: nic.interrupted,
            error: Some(nic.error).filter(|error| !error.is_empty()),
            limits: nic.limits.unwrap_or_default().into(),
            counters: nic.counters.unwrap_or_default().into(),
            objects: nic.objects.unwrap_or_default().into(),
            gids: nic.gids,
            worker: nic.worker,
        }
    }
}

impl ShownNic {
    fn access(&self) -> String {
        let mut text = format!("{}:{} {}", self.owner, self.group, self.mode);
        for entry in &self.acl {
            text += &format!(" {entry}");
        }
        text
    }

    fn rows(&self) -> Vec<[String; 2]> {
        let list = |items: &[String], none: &str| {
            if items.is_empty() { none.to_owned() } else { items.join(", ") }
        };
        let mut rows = vec![
            ["name".to_owned(), self.name.clone()],
            ["number".to_owned(), self.number.to_string()],
            ["network".to_owned(), format!("{} (VNI {})", self.network, self.vni)],
            ["mac".to_owned(), self.mac.clone()],
            ["addresses".to_owned(), list(&self.addresses, "any free one")],
            ["gids".to_owned(), list(&self.gids, "none")],
            ["worker".to_owned(), self.worker.to_string()],
            ["session".to_owned(), self.session.to_owned()],
        ];
        if self.interrupted {
            let told = "was connected to the daemon before this one and has not come back";
            rows.push(["VMM".to_owned(), told.to_owned()]);
        }
        if let Some(error) = &self.error {
            rows.push(["error".to_owned(), error.clone()]);
        }
        rows.extend([
            ["socket".to_owned(), self.socket.clone()],
            ["access".to_owned(), self.access()],
            [
                "queues".to_owned(),
                format!("{} ({} completion vectors)", self.num_queues, self.comp_vectors),
            ],
            [
                "virtio id".to_owned(),
                self.virtio_id.map_or_else(|| "as the VMM needs".to_owned(), |id| id.to_string()),
            ],
            ["backing".to_owned(), self.backing.clone()],
            ["for".to_owned(), self.guests.clone()],
        ]);
        rows
    }

    fn text(&self) -> String {
        let mut rows = self.rows();
        let indent = |[key, value]: [String; 2]| [format!("  {key}"), value];
        let parts = [
            ("limits", self.limits.rows()),
            ("objects", self.objects.rows()),
            ("counters", self.counters.rows()),
        ];
        for (title, part) in parts {
            rows.push([title.to_owned(), String::new()]);
            rows.extend(part.into_iter().map(indent));
        }
        columns(&rows)
    }

    fn row(&self) -> [String; 6] {
        let addresses =
            if self.addresses.is_empty() { "any".to_owned() } else { self.addresses.join(",") };
        let session = self.session.to_owned();
        [
            self.name.clone(),
            self.network.clone(),
            self.mac.clone(),
            addresses,
            session,
            self.objects.qps.to_string(),
        ]
    }
}

/// Something that is shown as text or JSON.
pub(super) trait Show: Serialize {
    /// For people.
    fn text(&self) -> String;
}

impl Show for ShownNic {
    fn text(&self) -> String {
        Self::text(self)
    }
}

/// A NIC that was just made or changed: the same JSON, and for people what they need next.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct Changed(pub(super) ShownNic);

impl Show for Changed {
    fn text(&self) -> String {
        columns(&self.0.rows())
    }
}

impl Show for Status {
    fn text(&self) -> String {
        columns(&self.rows())
    }
}

/// What reading the configuration again has done.
#[derive(Debug, Serialize)]
pub(super) struct Reloaded {
    pub(super) changed: Vec<String>,
    pub(super) kept: Vec<String>,
    pub(super) failed: Vec<String>,
}

impl From<v1::ReloadResponse> for Reloaded {
    fn from(message: v1::ReloadResponse) -> Self {
        let v1::ReloadResponse { changed, kept, failed } = message;
        Self { changed, kept, failed }
    }
}

/// What an upgrade has done.
#[derive(Debug, Serialize)]
pub(super) struct Upgraded {
    pub(super) from: String,
    pub(super) to: String,
    /// NICs whose guests had their device before.
    pub(super) ready_before: u32,
    pub(super) ready: u32,
    pub(super) lost: Vec<String>,
    /// Until the next program answered.
    pub(super) ms: u64,
    /// The longest that NICs of a network stood still; a program before this one may not say.
    pub(super) pause_us: Option<u64>,
}

impl Show for Upgraded {
    fn text(&self) -> String {
        let Self { from, to, ready_before, ready, ms, pause_us, .. } = self;
        let pause = pause_us.map(|pause| format!(" after {pause} us")).unwrap_or_default();
        format!(
            "{from} became {to} within {ms} ms; {ready} of {ready_before} guests go on{pause}\n"
        )
    }
}

/// What has become of a network's NICs.
#[derive(Debug, Serialize)]
pub(super) struct Restarted {
    pub(super) kept: Vec<String>,
    pub(super) lost: Vec<String>,
    pub(super) pause_us: u64,
}

impl From<v1::RestartNetworkResponse> for Restarted {
    fn from(message: v1::RestartNetworkResponse) -> Self {
        let v1::RestartNetworkResponse { kept, lost, pause_us } = message;
        Self { kept, lost, pause_us }
    }
}

impl Show for Restarted {
    fn text(&self) -> String {
        let lost: String = self.lost.iter().map(|nic| format!("lost: {nic}\n")).collect();
        let (kept, pause) = (self.kept.len(), self.pause_us);
        format!("{kept} NICs went on after {pause} us\n{lost}")
    }
}

impl Show for Reloaded {
    fn text(&self) -> String {
        let lines = |what: &str, all: &[String]| -> String {
            all.iter().map(|line| format!("{what}: {line}\n")).collect()
        };
        if self.changed.is_empty() && self.kept.is_empty() && self.failed.is_empty() {
            return "nothing has changed\n".to_owned();
        }
        lines("changed", &self.changed)
            + &lines("not changed", &self.kept)
            + &lines("failed", &self.failed)
    }
}

impl Show for Network {
    fn text(&self) -> String {
        columns(&self.rows())
    }
}

impl Show for Peer {
    fn text(&self) -> String {
        columns(&self.rows())
    }
}

impl Show for PeersReplaced {
    fn text(&self) -> String {
        columns(&self.rows())
    }
}

impl Show for Vec<Peer> {
    fn text(&self) -> String {
        let head = ["NETWORK", "ADDRESS", "THROUGH", "DAEMON", "SOURCE"].map(str::to_owned);
        let row = |peer: &Peer| {
            [&peer.network, &peer.address, &peer.through, &peer.daemon, &peer.source]
                .map(String::clone)
        };
        columns(&std::iter::once(head).chain(self.iter().map(row)).collect::<Vec<_>>())
    }
}

impl Show for Vec<ShownNic> {
    fn text(&self) -> String {
        let head = ["NAME", "NETWORK", "MAC", "ADDRESSES", "SESSION", "QPS"].map(str::to_owned);
        columns(&std::iter::once(head).chain(self.iter().map(ShownNic::row)).collect::<Vec<_>>())
    }
}

impl Show for Vec<Network> {
    fn text(&self) -> String {
        let head = ["NAME", "VNI", "NICS"].map(str::to_owned);
        let row = |network: &Network| {
            [network.name.clone(), network.vni.to_string(), network.nics.to_string()]
        };
        columns(&std::iter::once(head).chain(self.iter().map(row)).collect::<Vec<_>>())
    }
}

/// What a removal says.
#[derive(Debug, Serialize)]
pub(super) struct Removed {
    pub(super) removed: String,
    pub(super) warning: Option<String>,
}

impl Show for Removed {
    fn text(&self) -> String {
        self.warning.as_ref().map_or_else(String::new, |warning| format!("warning: {warning}\n"))
    }
}

/// Both versions; `daemon` is null if none answers.
#[derive(Debug, Serialize)]
pub(super) struct Versions {
    pub(super) client: &'static str,
    pub(super) daemon: Option<String>,
}

impl Show for Versions {
    fn text(&self) -> String {
        let daemon = self.daemon.as_deref().unwrap_or("not running");
        format!("vhost-rdma {}\ndaemon     {daemon}\n", self.client)
    }
}

/// Rows with aligned columns.
pub(super) fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (width, cell) in widths.iter().zip(row) {
            line.push_str(&format!("{cell:<width$}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Shows `what` on standard output.
pub(super) fn show(json: bool, what: &impl Show) -> Result<(), Failure> {
    if json { print_json(what) } else { print(what.text().as_bytes()) }
}

/// Writes one JSON document.
pub(super) fn print_json(what: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(what)
        .map_err(|error| Failure::Io { action: "write JSON".to_owned(), source: error.into() })?;
    print(format!("{text}\n").as_bytes())
}

/// Options for a VMM: a line for a shell, or a list.
pub(super) fn options(json: bool, options: &Vec<String>) -> Result<(), Failure> {
    if json {
        return print_json(options);
    }
    print(format!("{}\n", vhost_rdma_vmm::shell_line(options)?).as_bytes())
}

/// Writes to standard output; a reader that has seen enough (`| head`) is no failure.
pub(super) fn print(bytes: &[u8]) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(source) if source.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::Io { action: "write to standard output".to_owned(), source })
        }
        _ => Ok(()),
    }
}
