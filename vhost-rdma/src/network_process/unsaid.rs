//! What a network's process has not told yet to whoever knows all networks ([`super::uplink`]).
//!
//! It is never more than there is to tell, however slowly that is read. Of a queue pair or an
//! address, what counts is whether it is there in the end: one that came and went is not told at
//! all. A question goes when nobody waits for its answer any more, datagrams have places of their
//! NIC's share, and of neighbours that are looked for only so many wait, since who looks for one
//! asks again. An address is told of in the order in which it is given back and asked for, by
//! whatever NIC.
//!
//! Workers come here under a lock, so nothing here takes longer than a part of a turn, but for what
//! happens once with each new reader. Sans-I/O.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::exchange::{Asked, QPS_MAX, Told};
use crate::link::Gid;
use crate::rnic::{Mac, QuotaPermit};

/// Queue pairs of one message: who has another to tell of waits while they are counted out.
const STEP: usize = 256;
/// Neighbours that are to be looked for.
const WANTED_MAX: usize = 1024;
/// Notes that may be added to those that a reader begins with. One that has so many before it reads
/// none.
const NOTES_MAX: usize = 1 << 16;

const _: () = assert!(STEP <= QPS_MAX);

/// The reader does not keep up.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooSlow;

/// Queue pairs of one RNIC.
#[derive(Debug, Default)]
struct Device {
    told: BTreeSet<u32>,
    /// There, and not told.
    new: BTreeSet<u32>,
    /// Told, and not there any more.
    gone: BTreeSet<u32>,
}

impl Device {
    fn change(&mut self, qpn: u32, is_there: bool) {
        let told = self.told.contains(&qpn);
        let (wrong, right) = if is_there {
            (&mut self.gone, &mut self.new)
        } else {
            (&mut self.new, &mut self.gone)
        };
        wrong.remove(&qpn);
        if told != is_there {
            right.insert(qpn);
        }
    }

    /// Nothing was told.
    fn anew(&mut self) {
        for qpn in std::mem::take(&mut self.gone) {
            self.told.remove(&qpn);
        }
        if self.new.len() < self.told.len() {
            std::mem::swap(&mut self.new, &mut self.told);
        }
        self.new.extend(std::mem::take(&mut self.told));
    }

    /// The next ones to tell of: new ones, and those that are gone.
    fn next(&mut self) -> Option<(Vec<u32>, Vec<u32>)> {
        let take = |from: &mut BTreeSet<u32>, most| {
            std::iter::from_fn(|| from.pop_first()).take(most).collect::<Vec<_>>()
        };
        let gone = take(&mut self.gone, STEP);
        let new = take(&mut self.new, STEP - gone.len());
        gone.iter().for_each(|qpn| _ = self.told.remove(qpn));
        self.told.extend(&new);
        (gone.len() + new.len() > 0).then_some((new, gone))
    }
}

/// What a note is about: the last one counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    Question(u64),
    Address(Mac, Gid),
}

/// In their order.
#[derive(Debug, Default)]
struct Notes {
    last: u64,
    by_number: BTreeMap<u64, (Subject, Told)>,
    numbers: BTreeMap<Subject, u64>,
}

impl Notes {
    fn put(&mut self, subject: Subject, told: Told) {
        self.last += 1;
        if let Some(before) = self.numbers.insert(subject, self.last) {
            self.by_number.remove(&before);
        }
        self.by_number.insert(self.last, (subject, told));
    }

    fn cancel(&mut self, subject: Subject) {
        if let Some(number) = self.numbers.remove(&subject) {
            self.by_number.remove(&number);
        }
    }

    fn next(&mut self) -> Option<Told> {
        let (_, (subject, told)) = self.by_number.pop_first()?;
        self.numbers.remove(&subject);
        Some(told)
    }

    fn has(&self, subject: Subject) -> bool {
        self.numbers.contains_key(&subject)
    }

    fn len(&self) -> usize {
        self.numbers.len()
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Unsaid {
    devices: BTreeMap<String, Device>,
    notes: Notes,
    /// With how many notes the reader began.
    begun: usize,
    wanted: BTreeSet<Gid>,
    mads: VecDeque<(Told, QuotaPermit)>,
}

/// What a reader is to be told first: the addresses of NICs here.
pub(super) struct Held(Notes);

impl Held {
    pub(super) fn new(held: Vec<(Mac, Gid)>) -> Self {
        let mut notes = Notes::default();
        for (nic, gid) in held {
            notes.put(Subject::Address(nic, gid), Told::Asked(None, Asked::Address(nic, gid)));
        }
        Self(notes)
    }
}

impl Unsaid {
    pub(super) fn queue_pair(&mut self, device: &str, qpn: u32, is_there: bool) {
        if let Some(known) = self.devices.get_mut(device) {
            known.change(qpn, is_there);
        } else if is_there {
            self.devices.entry(device.to_owned()).or_default().change(qpn, is_there);
        }
    }

    /// A question, by its number.
    pub(super) fn ask(&mut self, number: u64, asked: Asked) {
        self.notes.put(Subject::Question(number), Told::Asked(Some(number), asked));
    }

    /// Nobody waits for the answer.
    pub(super) fn cancel(&mut self, number: u64) {
        self.notes.cancel(Subject::Question(number));
    }

    /// A NIC has an address, or has it no longer. Where there is no reader, this is for the next.
    pub(super) fn address(&mut self, nic: Mac, gid: Gid, has: bool) -> Result<(), TooSlow> {
        let subject = Subject::Address(nic, gid);
        if self.notes.len() >= self.begun + NOTES_MAX && !self.notes.has(subject) {
            return Err(TooSlow);
        }
        let told = if has {
            Told::Asked(None, Asked::Address(nic, gid))
        } else {
            Told::Release { nic, gid }
        };
        self.notes.put(subject, told);
        Ok(())
    }

    /// A neighbour is to be looked for.
    pub(super) fn want(&mut self, gid: Gid) {
        if self.wanted.len() < WANTED_MAX {
            self.wanted.insert(gid);
        }
    }

    pub(super) fn datagram(&mut self, told: Told, place: QuotaPermit) {
        self.mads.push_back((told, place));
    }

    /// There is a reader, who knows nothing. What has happened to an address since it was `held`
    /// comes after that.
    pub(super) fn begin(&mut self, Held(held): Held) {
        self.devices.values_mut().for_each(Device::anew);
        let before = std::mem::replace(&mut self.notes, held);
        for (subject, told) in before.by_number.into_values() {
            self.notes.put(subject, told);
        }
        self.begun = self.notes.len();
    }

    /// Nobody reads. Questions are still waited for: somebody may come.
    pub(super) fn end(&mut self) {
        self.devices.values_mut().for_each(Device::anew);
        let before = std::mem::take(&mut self.notes);
        for (subject, told) in before.by_number.into_values() {
            if matches!(subject, Subject::Question(_)) {
                self.notes.put(subject, told);
            }
        }
        self.begun = 0;
        self.wanted.clear();
        self.mads.clear();
    }

    /// What to tell next. Queue pairs first: a datagram may speak of one.
    pub(super) fn next(&mut self) -> Option<(Told, Option<QuotaPermit>)> {
        let queues = |(device, of): (&String, &mut Device)| {
            let (new, gone) = of.next()?;
            Some(Told::Queues { device: device.clone(), new, gone })
        };
        let told = self.devices.iter_mut().find_map(queues).or_else(|| self.notes.next());
        let told = told.or_else(|| self.wanted.pop_first().map(Told::Wanted));
        let mad = || self.mads.pop_front().map(|(told, place)| (told, Some(place)));
        told.map(|told| (told, None)).or_else(mad)
    }

    /// How much is kept.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let pairs = |of: &Device| of.told.len() + of.new.len() + of.gone.len();
        let queues: usize = self.devices.values().map(pairs).sum();
        queues + self.notes.by_number.len() + self.wanted.len() + self.mads.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rnic::NicQuota;

    const NIC: Mac = [2; 6];

    fn gid(number: u32) -> Gid {
        u128::from(number).to_be_bytes()
    }

    fn queues(device: &str, new: &[u32], gone: &[u32]) -> Told {
        Told::Queues { device: device.to_owned(), new: new.to_vec(), gone: gone.to_vec() }
    }

    /// All that is to be told.
    fn all(unsaid: &mut Unsaid) -> Vec<Told> {
        std::iter::from_fn(|| unsaid.next()).map(|(told, _)| told).collect()
    }

    #[test]
    fn what_came_and_went_is_not_told_and_all_else_is_once() {
        let mut unsaid = Unsaid::default();
        for qpn in 0..3000 {
            unsaid.queue_pair("a", qpn, true);
        }
        unsaid.queue_pair("a", 1, false);
        unsaid.queue_pair("b", 7, true);
        let mut told = BTreeSet::new();
        for message in all(&mut unsaid) {
            let Told::Queues { device, new, gone } = message else { panic!("{message:?}") };
            assert!(new.len() <= QPS_MAX && gone.is_empty());
            told.extend(new.into_iter().map(|qpn| (device.clone(), qpn)));
        }
        assert_eq!(told.len(), 3000, "all but one, and one of another device");
        assert!(told.contains(&("b".to_owned(), 7)) && !told.contains(&("a".to_owned(), 1)));
        unsaid.queue_pair("a", 2, false);
        unsaid.queue_pair("a", 2, true);
        unsaid.queue_pair("a", 9999, false);
        assert_eq!(all(&mut unsaid), []);
        unsaid.queue_pair("a", 2, false);
        assert_eq!(all(&mut unsaid), [queues("a", &[], &[2])]);
    }

    #[test]
    fn who_comes_is_told_what_there_is_and_what_has_changed_since() {
        let mut unsaid = Unsaid::default();
        for qpn in 1..=3 {
            unsaid.queue_pair("a", qpn, true);
        }
        assert_eq!(all(&mut unsaid), [queues("a", &[1, 2, 3], &[])]);
        unsaid.queue_pair("a", 2, false);
        unsaid.address(NIC, gid(1), false).unwrap();
        unsaid.want(gid(1));
        unsaid.ask(7, Asked::Address(NIC, gid(3)));
        unsaid.end();
        unsaid.queue_pair("a", 3, false);
        unsaid.queue_pair("a", 4, true);
        unsaid.address(NIC, gid(2), false).unwrap();
        unsaid.begin(Held::new(vec![(NIC, gid(1)), (NIC, gid(2)), (NIC, gid(4))]));
        let claim = |number, n| Told::Asked(number, Asked::Address(NIC, gid(n)));
        let gave_up = Told::Release { nic: NIC, gid: gid(2) };
        let notes = [claim(None, 1), claim(None, 4), claim(Some(7), 3), gave_up];
        assert_eq!(all(&mut unsaid), [&[queues("a", &[1, 4], &[])][..], &notes].concat());
    }

    #[test]
    fn of_an_address_the_last_word_counts_and_its_order_among_others() {
        let mut unsaid = Unsaid::default();
        let other = [4; 6];
        for _ in 0..1000 {
            unsaid.address(NIC, gid(1), true).unwrap();
            unsaid.address(NIC, gid(1), false).unwrap();
        }
        unsaid.ask(1, Asked::Address(other, gid(1)));
        unsaid.ask(2, Asked::Address(other, gid(2)));
        unsaid.cancel(2);
        unsaid.address(NIC, gid(2), true).unwrap();
        assert_eq!(
            all(&mut unsaid),
            [
                Told::Release { nic: NIC, gid: gid(1) },
                Told::Asked(Some(1), Asked::Address(other, gid(1))),
                Told::Asked(None, Asked::Address(NIC, gid(2))),
            ]
        );
        assert_eq!(unsaid.len(), 0);
    }

    #[test]
    fn what_nobody_reads_is_bounded_by_what_there_is() {
        let mut unsaid = Unsaid::default();
        let quota = NicQuota::default();
        unsaid.begin(Held::new((0..100).map(|n| (NIC, gid(n))).collect()));
        let mut too_slow = false;
        for n in 0..200_000 {
            // Ten queue pairs at a time, each with another number; a question that is given up.
            unsaid.queue_pair("a", n, true);
            unsaid.queue_pair("a", n.wrapping_sub(10), false);
            unsaid.ask(n.into(), Asked::Address(NIC, gid(n)));
            unsaid.cancel(n.into());
            unsaid.want(gid(n));
            too_slow |= unsaid.address(NIC, gid(n), false) == Err(TooSlow);
            if let Some(place) = quota.take() {
                unsaid.datagram(Told::Wanted(gid(n)), place);
            }
        }
        assert!(too_slow, "there is an end to the addresses");
        let most = 10 + 100 + NOTES_MAX + WANTED_MAX + crate::rnic::PER_NIC;
        assert!(unsaid.len() <= most, "{} of at most {most}", unsaid.len());
        unsaid.end();
        assert_eq!(unsaid.len(), 10, "the queue pairs that are there");
    }
}
