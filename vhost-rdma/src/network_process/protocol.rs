//! What supervisor and network process say to each other: plain data, and its form as bytes.
//!
//! JSON, since a message is rare (a NIC comes, a VMM says something, somebody asks) and names its
//! fields: what does not fit is an error and not another meaning. The process is the less trusted
//! side, because guests and VMMs talk to it. So a message has a bounded length and a known number
//! of descriptors, unknown fields and kinds are refused, and whoever reads one has to look at what
//! is in it ([`Report::check`]).

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::bad_message::{BadMessage, MESSAGE_MAX, plain};
use crate::device::Change;
use crate::nic::limits::GID_TABLE_LEN;
use crate::node::{COMP_VECTORS_MAX, Ending, NicConfig, NicStatus};
use crate::qpn::Key;
use crate::telemetry::LogFormat;
use crate::worker::TURN_BOUNDS;

/// Both sides are one program, but not one build, while it is being replaced on the disk.
pub const VERSION: u32 = 7;
/// Descriptors of a message: those of a whole memory table (`vhost` takes no more regions).
pub const FILES_MAX: usize = 32;
/// GIDs of a NIC.
const GIDS_MAX: usize = GID_TABLE_LEN as usize;
/// Virtqueues of a NIC.
const QUEUES_MAX: u32 = COMP_VECTORS_MAX as u32 + 4;

/// What a network process is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// [`VERSION`] of the supervisor.
    pub version: u32,
    /// The network's name, for the log.
    pub network: String,
    /// Worker threads; its NICs are spread over them.
    pub workers: u32,
    /// Microseconds that each polls.
    pub poll_us: u32,
    /// Form of the log.
    pub log_format: LogFormat,
    /// What is logged.
    pub log: Option<String>,
    /// How its QPNs come out of what it is lent.
    pub qpns: Key,
    /// Its NICs are on RNICs: it opens devices, and others know who else is on them.
    pub rnic: bool,
}

/// What the supervisor asks for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Request {
    /// The first of all.
    Start(Start),
    /// These blocks of QPNs are its own, too.
    Lend(Vec<u32>),
    /// Make a NIC.
    Add(NicConfig),
    /// Take its changed limits and addresses over.
    Update(NicConfig),
    /// End it.
    Remove(String),
    /// Serve the VMM at this stream, which comes along; the session's number.
    Connect(String, u64),
    /// Take in the process at this stream, which comes along.
    Enter(String),
    /// The stream of a session that is to go on.
    TakeUp(String, u64),
    /// A part of what is left of it, with its descriptors.
    Kept(u64, Change),
    /// That was all of it: go on.
    GoOn(u64),
    /// Come to rest for good, and write to the file that comes along what is to be handed on.
    Save,
    /// Take in what an earlier process wrote to the file that comes along.
    Load,
    /// All sessions are there: NICs that were loaded run.
    Run,
    /// What does the NIC do?
    Status(String),
    /// How is the worker?
    Figures,
    /// Log by this filter.
    Log(Option<String>),
    /// For NICs on RNICs: the peers of a VNI are those in the file that comes along.
    Peers(u32),
    /// For NICs on RNICs: by the socket that comes along it speaks to who knows all networks.
    Outside,
    /// Try what is denied; a build for tests only (`sandbox::tests`).
    #[cfg(test)]
    Attempt(String),
}

/// A request and its number, by which its answer is known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Numbered {
    /// Never the same twice.
    pub id: u64,
    /// What is asked for.
    pub request: Request,
}

/// What came of a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Answer {
    /// It is done.
    Done,
    /// It is done; these NICs lose nothing by it.
    Saved(Vec<String>),
    /// It cannot be, and why.
    Refused(String),
    /// What a NIC does.
    Status(Box<NicStatus>),
    /// How the worker is.
    Figures(Box<Figures>),
}

/// How a worker has been, in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figures {
    /// Turns by length, one number for each class.
    pub turns: Vec<u64>,
    /// All turns together.
    pub busy: u64,
    /// The longest.
    pub longest: u64,
    /// The most that one was charged.
    pub charged: u64,
    /// The present one.
    pub stalled: u64,
}

/// What a network process tells.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Report {
    /// The answer to the request with this number.
    Answer(u64, Answer),
    /// In a session, a message of the VMM is about to be taken from the stream.
    Begun(u64),
    /// In a session, something has changed; its descriptors come along.
    Changed(u64, Change),
    /// In a session, the VMM was answered.
    Done(u64),
    /// A session has ended, and nothing is left of it.
    Ended(u64, Ending),
    /// It will run short of QPNs.
    Short,
}

/// The bytes of a message.
///
/// # Errors
/// [`BadMessage::TooLong`].
pub fn encode<M: Serialize>(message: &M) -> Result<Vec<u8>, BadMessage> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MESSAGE_MAX {
        return Err(BadMessage::TooLong(bytes.len()));
    }
    Ok(bytes)
}

/// The message that bytes are.
///
/// # Errors
/// It is none.
pub fn decode<M: DeserializeOwned>(bytes: &[u8]) -> Result<M, BadMessage> {
    if bytes.len() > MESSAGE_MAX {
        return Err(BadMessage::TooLong(bytes.len()));
    }
    Ok(serde_json::from_slice(bytes)?)
}

fn check_files(found: usize, least: usize, most: usize) -> Result<(), BadMessage> {
    if (least..=most).contains(&found) {
        return Ok(());
    }
    let wanted = if least == most { least.to_string() } else { format!("{least} to {most}") };
    Err(BadMessage::Files { found, wanted })
}

/// Whether a change can be one, with so many descriptors.
///
/// # Errors
/// No sane process tells it.
pub fn check_change(change: &Change, files: usize) -> Result<(), BadMessage> {
    let (least, most) = match change {
        Change::Memory(pieces) => (pieces.len(), pieces.len().min(FILES_MAX)),
        Change::Plugged(_) => (1, 1),
        Change::Kick(_) | Change::Call(_) => (0, 1),
        _ => (0, 0),
    };
    check_files(files, least, most)?;
    let queue = match change {
        Change::Size(queue, _)
        | Change::Place(queue, _)
        | Change::Base(queue, _)
        | Change::Enabled(queue, _)
        | Change::Kick(queue)
        | Change::Call(queue)
        | Change::Stopped(queue, _) => *queue,
        _ => 0,
    };
    if queue < QUEUES_MAX { Ok(()) } else { Err(BadMessage::Content("such a queue")) }
}

impl Answer {
    fn check(&mut self) -> Result<(), BadMessage> {
        match self {
            // Names that are not known mean nothing.
            Self::Done | Self::Saved(_) => {}
            Self::Refused(why) => *why = plain(&*why),
            Self::Status(status) => {
                status.error = status.error.as_ref().map(plain);
                if status.gids.len() > GIDS_MAX {
                    return Err(BadMessage::Content("so many GIDs"));
                }
            }
            Self::Figures(figures) => {
                if figures.turns.len() != TURN_BOUNDS.len() + 1 {
                    return Err(BadMessage::Content("such classes of turns"));
                }
            }
        }
        Ok(())
    }
}

impl Report {
    /// Looks at what a report says, and makes texts fit to be shown. `files` came with it.
    ///
    /// # Errors
    /// No sane process says that.
    pub fn check(&mut self, files: usize) -> Result<(), BadMessage> {
        if let Self::Changed(_, change) = self {
            return check_change(change, files);
        }
        check_files(files, 0, 0)?;
        match self {
            Self::Answer(_, answer) => answer.check(),
            Self::Ended(_, Ending::Broken(why)) => {
                *why = plain(&*why);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::bad_message::TEXT_MAX;
    use super::*;
    use crate::device::Piece;

    fn reports() -> Vec<(Report, usize)> {
        let piece = Piece { start: 0, len: 4096, vmm: 1, offset: 0 };
        vec![
            (Report::Answer(1, Answer::Done), 0),
            (Report::Answer(2, Answer::Refused("no".to_owned())), 0),
            (Report::Answer(3, Answer::Status(Box::default())), 0),
            (Report::Begun(4), 0),
            (Report::Changed(4, Change::Memory(vec![piece, piece])), 2),
            (Report::Changed(4, Change::Kick(3)), 1),
            (Report::Changed(4, Change::Kick(3)), 0),
            (Report::Done(4), 0),
            (Report::Ended(4, Ending::Broken("why".to_owned())), 0),
            (Report::Short, 0),
        ]
    }

    #[test]
    fn what_is_said_is_understood() {
        for (report, files) in reports() {
            let mut read: Report = decode(&encode(&report).unwrap()).unwrap();
            read.check(files).unwrap();
            assert_eq!(read, report);
        }
    }

    #[test]
    fn a_status_keeps_its_numbers() {
        let mut status = NicStatus::default();
        status.counters.tx_bytes = u64::MAX;
        status.gids = vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()];
        let report = Report::Answer(1, Answer::Status(Box::new(status)));
        assert_eq!(decode::<Report>(&encode(&report).unwrap()).unwrap(), report);
    }

    #[test]
    fn descriptors_that_do_not_belong_are_refused() {
        for (mut report, files) in reports() {
            assert!(report.check(files + 2).is_err(), "{report:?}");
        }
        let piece = Piece { start: 0, len: 1, vmm: 0, offset: 0 };
        let mut many = Report::Changed(1, Change::Memory(vec![piece; FILES_MAX + 1]));
        assert!(many.check(FILES_MAX + 1).is_err() && many.check(FILES_MAX).is_err());
        assert!(Report::Changed(1, Change::Kick(QUEUES_MAX)).check(0).is_err());
    }

    #[test]
    fn a_text_is_one_line_for_people() {
        let text = format!("\x1b[2J\n{}", "x".repeat(1 << 16));
        let mut report = Report::Answer(1, Answer::Refused(text));
        report.check(0).unwrap();
        let Report::Answer(_, Answer::Refused(text)) = report else { panic!() };
        assert!(text.starts_with("?[2J?xxx") && text.len() == TEXT_MAX, "{}", text.len());
    }

    #[test]
    fn a_nic_has_no_more_addresses_than_its_table_has_room_for() {
        let with = |count: u16| {
            let gids = (0..count).map(|n| std::net::Ipv4Addr::from_bits(n.into()).into()).collect();
            let status = NicStatus { gids, ..NicStatus::default() };
            Report::Answer(1, Answer::Status(Box::new(status))).check(0)
        };
        with(GID_TABLE_LEN).unwrap();
        assert!(with(GID_TABLE_LEN + 1).is_err());
    }

    #[test]
    fn a_long_message_is_none() {
        let report = Report::Answer(1, Answer::Refused("x".repeat(MESSAGE_MAX)));
        assert!(matches!(encode(&report), Err(BadMessage::TooLong(_))));
        assert!(decode::<Report>(&vec![b' '; MESSAGE_MAX + 1]).is_err());
        let deep = "[".repeat(MESSAGE_MAX);
        assert!(decode::<Report>(deep.as_bytes()).is_err(), "no stack is that deep");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), 0..512)
        ) {
            let _ = decode::<Report>(&bytes);
        }

        /// Messages with some bytes changed: what is still understood is looked at without a fault.
        #[test]
        fn a_bent_message_is_looked_at(
            which in any::<prop::sample::Index>(),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
            files in 0usize..40,
        ) {
            let mut bytes = encode(&which.get(&reports()).0).unwrap();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Ok(mut report) = decode::<Report>(&bytes) {
                let _ = report.check(files);
            }
        }
    }
}
