//! What this driver saw a device do, for a run that must know whether everything was asked of it.
//!
//! A test that passes says nothing about a verb that the device did not offer it. So the driver
//! writes down, in the file that `$VHOST_RDMA_WITNESS` names, each thing that happened while a test
//! ran, once: `TEST<tab>FACT`. Without the variable nothing is written.
//!
//! | fact | when |
//! |---|---|
//! | `known TABLE NAME` | at first, for each number in the document's tables |
//! | `command NAME STATUS` | the device answered |
//! | `request TYPE OPCODE STATUS` | a work request that was posted on a QP of this type completed |
//! | `flag TYPE NAME` | and had this flag, and succeeded |
//! | `receive OPCODE STATUS`, `receive FLAG` | a receive completed; with this flag |
//! | `event NAME` | an asynchronous event came |

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Write;
use std::sync::{Mutex, OnceLock};

use crate::qp::SendWr;
use crate::ram::lock;
use crate::rings::Cqe;
use crate::spec::{cmd, cqe, err, event, qpt, send, status, wc, wr};

#[derive(Debug)]
struct Witness {
    file: File,
    test: String,
    /// What was written since the test began.
    told: HashSet<String>,
    /// Sends without a completion, by QPN and `wr_id`: type of the QP, opcode, flags.
    posted: HashMap<(u32, u64), (u32, u8, u8)>,
}

fn witness() -> Option<&'static Mutex<Witness>> {
    static WITNESS: OnceLock<Option<Mutex<Witness>>> = OnceLock::new();
    let made = WITNESS.get_or_init(|| {
        let path = std::env::var_os("VHOST_RDMA_WITNESS")?;
        let file = File::options().create(true).append(true).open(path);
        let file = file.expect("VHOST_RDMA_WITNESS names a file that can be written");
        let mut witness =
            Witness { file, test: "-".into(), told: HashSet::new(), posted: HashMap::new() };
        witness.introduce();
        Some(Mutex::new(witness))
    });
    made.as_ref()
}

impl Witness {
    fn introduce(&mut self) {
        for (_, name) in cmd::NAMES {
            self.tell(format!("known command {name}"));
        }
        for (_, name) in wr::NAMES {
            self.tell(format!("known request {name}"));
        }
        for (_, name) in event::NAMES {
            self.tell(format!("known event {name}"));
        }
        for (_, name) in status::NAMES {
            self.tell(format!("known status {name}"));
        }
    }

    fn tell(&mut self, fact: String) {
        if !self.told.contains(&fact) {
            // One write each: other processes append to the same file.
            let line = format!("{}\t{fact}\n", self.test);
            self.file.write_all(line.as_bytes()).expect("VHOST_RDMA_WITNESS takes a line");
            self.told.insert(fact);
        }
    }
}

fn name<T: Copy + PartialEq + std::fmt::Display>(names: &[(T, &str)], number: T) -> String {
    let known = names.iter().find(|(n, _)| *n == number);
    known.map_or_else(|| number.to_string(), |(_, name)| (*name).to_owned())
}

fn kind_name(kind: u32) -> &'static str {
    match kind {
        qpt::GSI => "GSI",
        qpt::RC => "RC",
        qpt::UC => "UC",
        qpt::UD => "UD",
        _ => "?",
    }
}

/// A daemon was started for the test that this thread runs.
pub(crate) fn begins() {
    if let Some(witness) = witness() {
        let mut witness = lock(witness);
        witness.test = std::thread::current().name().unwrap_or("?").to_owned();
        witness.told.clear();
        witness.posted.clear();
    }
}

/// A command was answered.
pub(crate) fn answered(opcode: u16, answer: u32) {
    if let Some(witness) = witness() {
        let fact = format!("command {} {}", name(cmd::NAMES, opcode), name(err::NAMES, answer));
        lock(witness).tell(fact);
    }
}

/// A send was written into the ring of a QP.
#[inline]
pub(crate) fn posted(qpn: u32, kind: u32, request: &SendWr) {
    if let Some(witness) = witness() {
        let what = (kind, request.opcode, request.flags);
        lock(witness).posted.insert((qpn, request.wr_id), what);
    }
}

/// A completion was taken.
#[inline]
pub(crate) fn completed(completion: &Cqe) {
    let Some(witness) = witness() else { return };
    let mut witness = lock(witness);
    let (ended, good) =
        (name(status::NAMES, completion.status), completion.status == status::SUCCESS);
    if completion.flags & cqe::RECV != 0 {
        // The opcode counts only if it succeeded (7.3).
        let opcode = if good && completion.opcode == wc::RECV_RDMA_WITH_IMM {
            "RECV_RDMA_WITH_IMM"
        } else {
            "RECV"
        };
        witness.tell(format!("receive {opcode} {ended}"));
        let flags = [
            (cqe::SRQ, "SRQ"),
            (cqe::GRH, "GRH"),
            (cqe::IMM, "IMM"),
            (cqe::INV, "INV"),
            (cqe::SOLICITED, "SOLICITED"),
        ];
        for (_, flag) in flags.iter().filter(|(bit, _)| good && completion.flags & bit != 0) {
            witness.tell(format!("receive {flag}"));
        }
        return;
    }
    let Some((kind, opcode, flags)) = witness.posted.remove(&(completion.qpn, completion.wr_id))
    else {
        return;
    };
    let kind = kind_name(kind);
    witness.tell(format!("request {kind} {} {ended}", name(wr::NAMES, opcode)));
    let names = [(send::FENCE, "FENCE"), (send::SOLICITED, "SOLICITED"), (send::INLINE, "INLINE")];
    for (_, flag) in names.iter().filter(|(bit, _)| good && flags & bit != 0) {
        witness.tell(format!("flag {kind} {flag}"));
    }
}

/// An asynchronous event was taken.
pub(crate) fn raised(kind: u32) {
    if let Some(witness) = witness() {
        lock(witness).tell(format!("event {}", name(event::NAMES, kind)));
    }
}
