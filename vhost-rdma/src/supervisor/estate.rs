//! What an earlier supervisor left in the store: the sessions of VMMs that are still connected.
//!
//! It ended without a word, so nothing here is sure. What cannot be read, or does not fit a NIC of
//! today, is said in the log and let go of, which ends that VMM's connection and nothing else.
//! What its network processes had told and nobody had read yet is in the queues of their sockets,
//! which it kept as well; they are read to the end, since a VMM may have its answer already.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::child::hang_up;
use super::keeper::check_kinds;
use super::ledger::{self, Whose};
use super::lender::Handed;
use super::part::label;
use super::record::Record;
use crate::aside::close_aside;
use crate::network_process::{Report, Wire, decode};
use crate::nic::Nanos;
use crate::node::NicConfig;
use crate::store::{Heirloom, Store};

/// How long the end of a queue may be away: its writer has ended or is ending.
const END: Duration = Duration::from_secs(2);

/// Bytes of a list of all blocks of QPNs there are, and more.
const HANDED_MAX: u64 = 1 << 16;

/// A session that can go on.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) stream: UnixStream,
    pub(super) record: Record,
    /// What it has in the store.
    pub(super) names: Vec<String>,
    /// By which its names go together.
    pub(super) serial: u64,
    whose: Whose,
}

#[cfg(test)]
impl Left {
    /// One that has told nothing.
    pub(super) fn of(stream: UnixStream) -> Self {
        let (record, names, whose) = (Record::default(), Vec::new(), Whose::default());
        Self { stream, record, names, serial: 1, whose }
    }
}

/// What a network's process has saved, and when it was asked to come to rest.
pub(super) type Saved = (OwnedFd, Option<Nanos>);

/// See the module.
#[derive(Debug, Default)]
pub struct Estate {
    pub(super) store: Store,
    /// By NIC.
    left: Mutex<BTreeMap<String, Left>>,
    /// What processes have saved, by network.
    states: Mutex<BTreeMap<String, Saved>>,
    /// The QPNs that networks were lent.
    qpns: Mutex<BTreeMap<String, Handed>>,
}

/// What a name in the store says.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Stream(u64),
    Ledger(u64, u64),
    Wire,
    /// What a network's process has saved. Programs before this one say no time.
    State(Option<Nanos>),
    /// The QPNs that a network was lent.
    Qpns,
}

fn parse(name: &str) -> Option<(Kind, &str)> {
    let (what, whose) = name.split_once('@')?;
    let mut words = what.split('.');
    let kind = words.next()?;
    let mut number = || words.next()?.parse().ok();
    let kind = match kind {
        "stream" => Kind::Stream(number()?),
        "ledger" => Kind::Ledger(number()?, number()?),
        "wire" => Kind::Wire,
        "state" => Kind::State(number()),
        "qpns" => Kind::Qpns,
        _ => return None,
    };
    Some((kind, whose))
}

/// One session's part of it.
#[derive(Default)]
struct Part {
    stream: Option<OwnedFd>,
    /// By age.
    pages: BTreeMap<u64, OwnedFd>,
    names: Vec<String>,
}

/// The QPNs that a network was lent; none if the file does not say.
fn read_qpns(name: &str, file: OwnedFd) -> Option<Handed> {
    let read = serde_json::from_reader(File::from(file).take(HANDED_MAX));
    read.inspect_err(|error| tracing::error!(name, %error, "QPNs were handed down badly")).ok()
}

/// The sessions that can go on, by NIC; names of what is of no use join `strange`.
fn take_up_all(
    parts: BTreeMap<(String, u64), Part>,
    strange: &mut Vec<String>,
) -> BTreeMap<String, Left> {
    let mut left: BTreeMap<String, Left> = BTreeMap::new();
    for ((nic, serial), part) in parts {
        let names = part.names.clone();
        match part.take_up(&nic, serial) {
            // The later one is the one that is there.
            Ok(session) => {
                strange.extend(left.insert(nic, session).into_iter().flat_map(|old| old.names));
            }
            Err(error) => {
                tracing::error!(nic, error, "what is left of a session is not to be read");
                strange.extend(names);
            }
        }
    }
    left
}

impl Estate {
    /// Reads what was left.
    #[must_use]
    pub fn read(store: Store, heirlooms: Vec<Heirloom>) -> Self {
        let mut parts: BTreeMap<(String, u64), Part> = BTreeMap::new();
        let (mut wires, mut strange) = (Vec::new(), Vec::new());
        let (mut states, mut qpns) = (BTreeMap::new(), BTreeMap::new());
        for (name, file) in heirlooms {
            let Some((kind, whose)) = parse(&name) else {
                tracing::error!(name, "the store has a descriptor that is none of ours");
                strange.push(name);
                continue;
            };
            let serial = match kind {
                Kind::Wire => {
                    wires.push((whose.to_owned(), name, file));
                    continue;
                }
                Kind::State(since) => {
                    states.insert(whose.to_owned(), (file, since));
                    continue;
                }
                Kind::Qpns => {
                    qpns.extend(read_qpns(&name, file).map(|handed| (whose.to_owned(), handed)));
                    continue;
                }
                Kind::Stream(serial) | Kind::Ledger(serial, _) => serial,
            };
            let part = parts.entry((whose.to_owned(), serial)).or_default();
            match kind {
                Kind::Ledger(_, page) => drop(part.pages.insert(page, file)),
                _ => part.stream = Some(file),
            }
            part.names.push(name);
        }
        let mut left = take_up_all(parts, &mut strange);
        for (network, name, file) in wires {
            hear_out(&network, file, &mut left);
            strange.push(name);
        }
        strange.iter().for_each(|name| store.forget(name));
        let (left, states, qpns) = (Mutex::new(left), Mutex::new(states), Mutex::new(qpns));
        Self { store, left, states, qpns }
    }

    /// The session of this NIC, if it has one that can go on.
    pub(super) fn claim(&self, nic: &NicConfig) -> Option<Left> {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner).remove(&nic.name)?;
        let Whose { network, vni, mac, .. } = &left.whose;
        let same =
            (network, *vni, mac.as_str()) == (&label(nic), nic.vni, nic.mac.to_string().as_str());
        if same && left.record.is_whole() {
            return Some(left);
        }
        let why = if same { "it was in the middle of a message" } else { "the NIC is another one" };
        tracing::error!(nic = nic.name, why, "the VMM's session cannot go on");
        self.let_go(&left);
        None
    }

    /// What the process of this network has saved.
    pub(super) fn state(&self, network: &str) -> Option<Saved> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner).remove(network)
    }

    /// The QPNs that networks were lent.
    pub(super) fn take_qpns(&self) -> BTreeMap<String, Handed> {
        std::mem::take(&mut *self.qpns.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whatever nobody has claimed ends.
    pub(super) fn close(&self) {
        let left = std::mem::take(&mut *self.left.lock().unwrap_or_else(PoisonError::into_inner));
        for (nic, left) in left {
            tracing::error!(nic, "a VMM's session cannot go on: there is no such NIC any more");
            self.let_go(&left);
        }
    }

    fn let_go(&self, left: &Left) {
        let _ = left.stream.shutdown(std::net::Shutdown::Both);
        left.names.iter().for_each(|name| self.store.forget(name));
    }
}

impl Part {
    fn take_up(self, nic: &str, serial: u64) -> Result<Left, String> {
        let stream = UnixStream::from(self.stream.ok_or("its stream is missing")?);
        // One that is no stream at all is found out here.
        stream.peer_addr().map_err(|error| format!("its stream: {error}"))?;
        let mut why = "its ledger is missing".to_owned();
        for file in self.pages.into_values().rev() {
            let wire = Wire::new(file);
            let heard = wire.set_hearing(END).map_err(ledger::BadLedger::from);
            match heard.and_then(|()| ledger::read(&wire)) {
                Ok((whose, record)) if whose.nic == nic => {
                    return Ok(Left { stream, record, names: self.names, serial, whose });
                }
                Ok(_) => why = "its ledger is another NIC's".to_owned(),
                Err(error) => why = format!("its ledger: {error}"),
            }
        }
        Err(why)
    }
}

/// What a network's process had told when its supervisor ended.
fn hear_out(network: &str, file: OwnedFd, left: &mut BTreeMap<String, Left>) {
    let wire = Wire::new(file);
    let heard = wire.set_hearing(END).and_then(|()| apply(network, &wire, left));
    // Whoever still is at the other end is to end.
    hang_up(&wire);
    if let Err(error) = heard {
        tracing::error!(network, %error, "what its process told last is not known");
        for left in left.values_mut().filter(|left| left.whose.network == network) {
            left.record.lose();
        }
    }
}

fn apply(network: &str, wire: &Wire, left: &mut BTreeMap<String, Left>) -> io::Result<()> {
    let until = Instant::now() + END;
    while let Some(packet) = wire.receive()? {
        // What waited in the queue is read in less.
        if Instant::now() >= until {
            return Err(io::Error::other("somebody goes on talking there"));
        }
        let mut report: Report = decode(&packet.bytes).map_err(io::Error::other)?;
        if !packet.files_lost {
            report.check(packet.files.len()).map_err(io::Error::other)?;
        }
        check_kinds(&report, &packet.files).inspect_err(|_| hang_up(wire))?;
        let id = match &report {
            Report::Begun(id) | Report::Done(id) | Report::Changed(id, _) => *id,
            Report::Ended(id, _) => *id,
            Report::Answer(..) | Report::Short => continue,
        };
        let found = left.values_mut().find(|l| l.whose.network == network && l.whose.session == id);
        let Some(Left { record, .. }) = found else { continue };
        match report {
            Report::Begun(_) => record.set_busy(true),
            Report::Done(_) => record.set_busy(false),
            Report::Changed(_, change) => {
                close_aside(ledger::LEFT, record.apply(change, packet.files));
            }
            Report::Ended(..) => record.lose(),
            Report::Answer(..) | Report::Short => {}
        }
        if packet.files_lost {
            record.lose();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;

    use proptest::prelude::*;
    use rustix::event::{EventfdFlags, eventfd};

    use super::super::ledger::{Entry, Ledger};
    use super::*;
    use crate::device::Change;
    use crate::store::tests::Listener;

    fn whose(nic: &str, session: u64) -> Whose {
        Whose {
            version: ledger::VERSION,
            nic: nic.into(),
            network: "net".into(),
            session,
            ..Whose::default()
        }
    }

    fn null() -> OwnedFd {
        File::open("/dev/null").unwrap().into()
    }

    /// A session as a supervisor has it, and its VMM's end.
    fn begin(store: &Store, nic: &str, session: u64) -> (Ledger, Record, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        let (mut ledger, record) =
            (Ledger::new(store, whose(nic, session), None), Record::default());
        ledger.begin(&near, &record);
        (ledger, record, far)
    }

    fn tell(ledger: &mut Ledger, record: &mut Record, change: Change, file: Option<OwnedFd>) {
        let files: Vec<OwnedFd> = file.into_iter().collect();
        let own: Vec<_> = files.iter().map(OwnedFd::as_fd).collect();
        let noted = ledger.note(&Entry::Changes(vec![change.clone()]), &own);
        drop(own);
        let _ = record.apply(change, files);
        ledger.settle(noted, record);
    }

    #[test]
    fn what_was_written_is_read_however_much_it_was() {
        let listener = Listener::new();
        let (mut ledger, mut record, _vmm) = begin(&listener.store, "a", 1);
        for round in 0..40 {
            tell(&mut ledger, &mut record, Change::Features(round), None);
            for queue in 0..30 {
                tell(&mut ledger, &mut record, Change::Size(queue, 64), None);
                tell(&mut ledger, &mut record, Change::Call(queue), Some(null()));
                tell(&mut ledger, &mut record, Change::Kick(queue), Some(null()));
            }
            listener.take();
        }
        let expected: Vec<_> = record.changes().into_iter().map(|(c, f)| (c, f.len())).collect();
        ledger.die();
        let estate = Estate::read(Store::default(), listener.heirlooms());
        let left = estate.left.lock().unwrap();
        let found: Vec<_> =
            left["a"].record.changes().into_iter().map(|(c, f)| (c, f.len())).collect();
        assert_eq!(found, expected);
        assert!(left["a"].record.is_whole());
    }

    #[test]
    fn a_session_in_the_middle_of_a_message_is_not_claimed() {
        let listener = Listener::new();
        let (mut ledger, mut record, mut vmm) = begin(&listener.store, "a", 1);
        record.set_busy(true);
        let noted = ledger.note(&Entry::Begun, &[]);
        ledger.settle(noted, &record);
        ledger.die();
        let estate = Estate::read(Store::default(), listener.heirlooms());
        assert!(!estate.left.lock().unwrap()["a"].record.is_whole());
        estate.close();
        assert_eq!(io::Read::read(&mut vmm, &mut [0; 1]).unwrap(), 0, "the VMM is told");
    }

    #[test]
    fn what_a_process_had_told_and_nobody_had_read_counts() {
        let listener = Listener::new();
        let (ledger, _record, _vmm) = begin(&listener.store, "a", 7);
        ledger.die();
        let (process, near) = Wire::pair().unwrap();
        let report = |report: &Report| crate::network_process::encode(report).unwrap();
        process.send(&report(&Report::Begun(7)), &[]).unwrap();
        let call = Report::Changed(7, Change::Call(2));
        let signal = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        process.send(&report(&call), &[signal.as_fd()]).unwrap();
        process.send(&report(&Report::Done(7)), &[]).unwrap();
        process.send(&report(&Report::Begun(8)), &[]).unwrap();
        drop(process);
        let mut heirlooms = listener.heirlooms();
        heirlooms.push(("wire.1@net".to_owned(), near));
        let estate = Estate::read(Store::default(), heirlooms);
        let left = estate.left.lock().unwrap();
        assert_eq!(left["a"].record.changes().len(), 1);
        assert!(left["a"].record.is_whole());
    }

    /// What a process had as its end of the wire, its VMM may have got.
    #[test]
    fn who_never_stops_talking_is_not_heard_for_ever() {
        let listener = Listener::new();
        let (ledger, _record, mut vmm) = begin(&listener.store, "a", 7);
        ledger.die();
        let (process, near) = Wire::pair().unwrap();
        let talks = std::thread::spawn(move || {
            let begun = crate::network_process::encode(&Report::Begun(8)).unwrap();
            while process.send(&begun, &[]).is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let mut heirlooms = listener.heirlooms();
        heirlooms.push(("wire.1@net".to_owned(), near));
        let begin = Instant::now();
        let estate = Estate::read(Store::default(), heirlooms);
        assert!(begin.elapsed() < 3 * END, "{:?}", begin.elapsed());
        talks.join().unwrap();
        // What it told last is not known.
        assert!(!estate.left.lock().unwrap()["a"].record.is_whole());
        estate.close();
        assert_eq!(io::Read::read(&mut vmm, &mut [0; 1]).unwrap(), 0, "the VMM is told");
    }

    fn junk() -> impl Strategy<Value = (String, u8, Vec<u8>)> {
        let kinds = ["stream", "ledger", "wire", "", "x"];
        let name = (proptest::sample::select(kinds.to_vec()), 0u64..3, 0u64..3, "[ab@.]{0,3}")
            .prop_map(|(kind, n, m, whose)| format!("{kind}.{n}.{m}@{whose}"));
        (name, 0u8..3, proptest::collection::vec(any::<u8>(), 0..64))
    }

    /// A descriptor of some kind; the other end of a socket has said something and is gone.
    fn strange(kind: u8, says: &[u8]) -> OwnedFd {
        match kind {
            0 => null(),
            1 => {
                let (near, mut far) = UnixStream::pair().unwrap();
                io::Write::write_all(&mut far, says).unwrap();
                near.into()
            }
            _ => {
                let (far, near) = Wire::pair().unwrap();
                far.send(says, &[null().as_fd()]).unwrap();
                near
            }
        }
    }

    proptest! {
        /// Whatever else is in the store, the session that is whole goes on.
        #[test]
        fn junk_in_the_store_costs_nobody_anything(
            junk in proptest::collection::vec(junk(), 0..12),
        ) {
            let listener = Listener::new();
            let (ledger, _record, _vmm) = begin(&listener.store, "good", 1);
            ledger.die();
            let made =
                |(name, kind, says): &(String, u8, Vec<u8>)| (name.clone(), strange(*kind, says));
            let mut heirlooms: Vec<Heirloom> = junk.iter().map(made).collect();
            heirlooms.extend(listener.heirlooms());
            let estate = Estate::read(Store::default(), heirlooms);
            let left = estate.left.lock().unwrap();
            prop_assert_eq!(left.keys().collect::<Vec<_>>(), ["good"]);
            prop_assert!(left["good"].record.is_whole());
        }
    }
}
