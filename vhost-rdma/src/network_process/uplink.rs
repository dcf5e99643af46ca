//! The process's way to whoever knows all networks: questions, news and datagrams, over a socket
//! that the supervisor gives it.
//!
//! ```text
//!  worker ──────────> queue ──> `uplink` thread ──> wire       never waits; the thread may
//!  command's thread ─ question ─────^   <── Settled ── the process's own thread
//! ```
//!
//! Queue pairs come and go at the guests' pace, so what is told is what has changed since the last
//! message, a thousand at a time: one that came and went in between is not told at all. A datagram
//! has a place of its NIC's share until it is sent. All together go at a pace that leaves time for
//! other networks.
//!
//! Who is at the other end may die, and then there is nobody for a moment: what is said meanwhile
//! is lost, and who asks is refused in the end. The next one is told again what there is.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::exchange::{Asked, Datagram, QPS_MAX, Settled, Told};
use super::protocol::encode;
use super::wire::Wire;
use crate::cm::Mad;
use crate::link::Gid;
use crate::rnic::{Far, Mac, NicQuota, QuotaPermit, Uplink};
use crate::worker::Seal;

/// How long an answer may take. It is looked up in a table; who does may be busy.
const PATIENCE: Duration = Duration::from_secs(5);
/// Messages of a window, and how long that is: a connection takes three.
const PACE: u32 = 200;
const WINDOW: Duration = Duration::from_millis(100);

/// What is to be said.
enum Item {
    Note(Told),
    Queue(String, u32, bool),
    Mad(Told, QuotaPermit),
    /// Somebody else is at the other end: these addresses are held.
    Anew(Vec<(Mac, Gid)>),
}

/// To whoever is at the other end.
type Line = Arc<Mutex<Option<Arc<Wire>>>>;

/// Who waits for answers, by the numbers of their questions.
type Waiting = Arc<Mutex<(u64, BTreeMap<u64, SyncSender<Settled>>)>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// See the module.
pub(super) struct ToOutside {
    queue: UnboundedSender<Item>,
    waiting: Waiting,
    line: Line,
}

impl ToOutside {
    /// Starts the thread, and waits until it has sealed itself.
    ///
    /// # Errors
    /// The host refuses a thread, or it could not be sealed.
    pub(super) fn start(seal: Option<Seal>) -> io::Result<Arc<Self>> {
        let (queue, items) = unbounded_channel();
        let line = Line::default();
        let own = line.clone();
        let (ready, sealed) = sync_channel(1);
        let thread = std::thread::Builder::new().name("uplink".to_owned());
        thread.spawn(move || {
            let done = seal.map_or(Ok(()), |seal| seal());
            let go_on = done.is_ok();
            // Whoever started the thread waits for it.
            let _ = ready.send(done);
            if go_on {
                Sender {
                    line: own,
                    notes: VecDeque::new(),
                    mads: VecDeque::new(),
                    queues: Queues::default(),
                }
                .run(items);
            }
        })?;
        sealed.recv().map_err(io::Error::other)??;
        Ok(Arc::new(Self { queue, waiting: Waiting::default(), line }))
    }

    /// Speaks by this wire from now on, to somebody who knows nothing yet; `held` are the addresses
    /// of NICs here.
    pub(super) fn attach(&self, wire: Arc<Wire>, held: Vec<(Mac, Gid)>) {
        *lock(&self.line) = Some(wire);
        let _ = self.queue.send(Item::Anew(held));
    }

    /// There is nobody at the other end.
    pub(super) fn detach(&self) {
        *lock(&self.line) = None;
    }

    /// An answer has come.
    pub(super) fn settle(&self, number: u64, settled: Settled) {
        if let Some(waiting) = lock(&self.waiting).1.remove(&number) {
            // There is room for one, and one comes.
            let _ = waiting.try_send(settled);
        }
    }

    fn ask(&self, asked: Asked) -> Option<Settled> {
        let (answer, answered) = sync_channel(1);
        let number = {
            let mut waiting = lock(&self.waiting);
            waiting.0 += 1;
            let number = waiting.0;
            waiting.1.insert(number, answer);
            number
        };
        self.note(Told::Asked(Some(number), asked));
        let settled = answered.recv_timeout(PATIENCE).ok();
        lock(&self.waiting).1.remove(&number);
        settled
    }

    fn note(&self, told: Told) {
        // Whoever listens ends with the process.
        let _ = self.queue.send(Item::Note(told));
    }
}

impl Uplink for ToOutside {
    fn claim(&self, nic: Mac, gid: Gid) -> Option<bool> {
        match self.ask(Asked::Address(nic, gid))? {
            Settled::Address(granted) => Some(granted),
            Settled::Peer(_) => None,
        }
    }

    fn repeat_claim(&self, nic: Mac, gid: Gid) {
        self.note(Told::Asked(None, Asked::Address(nic, gid)));
    }

    fn release(&self, nic: Mac, gid: Gid) {
        self.note(Told::Release { nic, gid });
    }

    fn queue_pair(&self, device: &str, qpn: u32, is_there: bool) {
        let _ = self.queue.send(Item::Queue(device.to_owned(), qpn, is_there));
    }

    fn find(&self, gid: Gid) {
        self.note(Told::Wanted(gid));
    }

    fn peer(&self, device: &str, gid: Gid, qpn: u32) -> Option<Far> {
        match self.ask(Asked::Peer { device: device.to_owned(), gid, qpn })? {
            Settled::Peer(far) => Some(far),
            Settled::Address(_) => None,
        }
    }

    fn carry(&self, quota: &NicQuota, nic: Mac, mad: Mad) -> bool {
        let Some(permit) = quota.take() else { return false };
        let told = Told::Datagram(nic, Datagram::of(&mad));
        self.queue.send(Item::Mad(told, permit)).is_ok()
    }
}

/// Queue pairs: what was told, and what has changed since.
#[derive(Default)]
struct Queues {
    told: BTreeSet<(String, u32)>,
    changed: BTreeMap<(String, u32), bool>,
}

impl Queues {
    fn change(&mut self, device: String, qpn: u32, is_there: bool) {
        let key = (device, qpn);
        if self.told.contains(&key) == is_there {
            self.changed.remove(&key);
        } else {
            self.changed.insert(key, is_there);
        }
    }

    /// Nothing was told.
    fn anew(&mut self) {
        for key in std::mem::take(&mut self.told) {
            // One that is gone since need not be told at all.
            if self.changed.remove(&key).is_none() {
                self.changed.insert(key, true);
            }
        }
    }

    /// The next message; none if all is told.
    fn next(&mut self) -> Option<Told> {
        let device = self.changed.first_key_value()?.0.0.clone();
        let (mut new, mut gone) = (Vec::new(), Vec::new());
        while new.len() + gone.len() < QPS_MAX
            && let Some(entry) = self.changed.first_entry()
            && entry.key().0 == device
        {
            let (key, is_there) = entry.remove_entry();
            let qpn = key.1;
            if is_there {
                self.told.insert(key);
                new.push(qpn);
            } else {
                self.told.remove(&key);
                gone.push(qpn);
            }
        }
        Some(Told::Queues { device, new, gone })
    }
}

struct Sender {
    line: Line,
    notes: VecDeque<Told>,
    mads: VecDeque<(Told, QuotaPermit)>,
    queues: Queues,
}

impl Sender {
    fn run(mut self, mut items: UnboundedReceiver<Item>) {
        let (mut since, mut count) = (Instant::now(), 0);
        while let Some(first) = items.blocking_recv() {
            self.take(first);
            loop {
                while let Ok(item) = items.try_recv() {
                    self.take(item);
                }
                let Some((told, _place)) = self.next() else { break };
                let Some(wire) = lock(&self.line).clone() else { continue };
                let sent = encode(&told).map_err(io::Error::other);
                if let Err(error) = sent.and_then(|bytes| wire.send(&bytes, &[])) {
                    // There is another one soon, or the end.
                    tracing::debug!(%error, "nobody listens");
                }
                count += 1;
                let passed = since.elapsed();
                if passed >= WINDOW {
                    (since, count) = (Instant::now(), 0);
                } else if count >= PACE {
                    std::thread::sleep(WINDOW.saturating_sub(passed));
                }
            }
        }
    }

    fn take(&mut self, item: Item) {
        match item {
            Item::Note(told) => self.notes.push_back(told),
            Item::Queue(device, qpn, is_there) => self.queues.change(device, qpn, is_there),
            Item::Mad(told, permit) => self.mads.push_back((told, permit)),
            Item::Anew(held) => {
                self.queues.anew();
                let claims = held.into_iter().map(|(nic, gid)| Asked::Address(nic, gid));
                claims.rev().for_each(|claim| self.notes.push_front(Told::Asked(None, claim)));
            }
        }
    }

    /// Queue pairs first: a datagram may speak of one.
    fn next(&mut self) -> Option<(Told, Option<QuotaPermit>)> {
        let told = self.queues.next().or_else(|| self.notes.pop_front());
        let mad = || self.mads.pop_front().map(|(told, permit)| (told, Some(permit)));
        told.map(|told| (told, None)).or_else(mad)
    }
}

#[cfg(test)]
mod tests {
    use super::super::protocol::decode;
    use super::*;
    use crate::cm::MAD_LEN;

    fn told(wire: &Wire) -> Told {
        decode(&wire.receive().unwrap().unwrap().bytes).unwrap()
    }

    /// An uplink, and who is at its other end.
    fn uplink() -> (Wire, Arc<ToOutside>) {
        let uplink = ToOutside::start(None).unwrap();
        (attach(&uplink, vec![]), uplink)
    }

    fn attach(uplink: &ToOutside, held: Vec<(Mac, Gid)>) -> Wire {
        let (near, far) = Wire::pair().unwrap();
        uplink.attach(Arc::new(Wire::new(far)), held);
        near
    }

    #[test]
    fn who_comes_to_the_other_end_is_told_all_that_there_is() {
        let (outside, uplink) = uplink();
        let device = || "a".to_owned();
        let queues = |new| Told::Queues { device: device(), new, gone: vec![] };
        uplink.queue_pair("a", 1, true);
        assert_eq!(told(&outside), queues(vec![1]));
        uplink.queue_pair("a", 2, true);
        assert_eq!(told(&outside), queues(vec![2]));
        drop(outside);
        uplink.detach();
        uplink.queue_pair("a", 1, false);
        let (nic, gid) = ([2; 6], [1; 16]);
        let next = attach(&uplink, vec![(nic, gid)]);
        assert_eq!(told(&next), queues(vec![2]), "one is gone");
        assert_eq!(told(&next), Told::Asked(None, Asked::Address(nic, gid)));
        uplink.queue_pair("a", 2, false);
        assert_eq!(told(&next), Told::Queues { device: device(), new: vec![], gone: vec![2] });
    }

    #[test]
    fn what_came_and_went_is_not_told_and_all_else_is_once() {
        let mut queues = Queues::default();
        let device = || "a".to_owned();
        for qpn in 0..3000 {
            queues.change(device(), qpn, true);
        }
        queues.change(device(), 1, false);
        queues.change("b".to_owned(), 7, true);
        let mut all = Vec::new();
        while let Some(Told::Queues { device, new, gone }) = queues.next() {
            assert!(new.len() <= QPS_MAX && gone.is_empty());
            all.extend(new.into_iter().map(|qpn| (device.clone(), qpn)));
        }
        assert_eq!(all.len(), 3000, "all but one, and one of another device");
        assert!(all.contains(&("b".to_owned(), 7)) && !all.contains(&(device(), 1)));
        queues.change(device(), 2, false);
        queues.change(device(), 2, true);
        assert_eq!(queues.next(), None);
        queues.change(device(), 2, false);
        let gone = Told::Queues { device: device(), new: vec![], gone: vec![2] };
        assert_eq!(queues.next(), Some(gone));
    }

    #[test]
    fn a_question_waits_for_its_own_answer() {
        let (supervisor, uplink) = uplink();
        let asks = uplink.clone();
        let asked = std::thread::spawn(move || asks.claim([2; 6], [1; 16]));
        let Told::Asked(Some(number), Asked::Address(nic, gid)) = told(&supervisor) else {
            panic!("no question")
        };
        assert_eq!((nic, gid), ([2; 6], [1; 16]));
        uplink.settle(number + 1, Settled::Address(false));
        uplink.settle(number, Settled::Address(true));
        assert_eq!(asked.join().unwrap(), Some(true));
        assert!(lock(&uplink.waiting).1.is_empty());
    }

    #[test]
    fn who_floods_waits_and_has_its_share_of_places() {
        let (supervisor, uplink) = uplink();
        let quota = NicQuota::default();
        let bytes = [0; MAD_LEN];
        let mad = Mad { source: [1; 16], dest: [2; 16], traffic_class: 0, sl: 0, bytes };
        let begin = Instant::now();
        let reader = std::thread::spawn(move || {
            let mut heard = 0;
            while matches!(told(&supervisor), Told::Datagram(..)) {
                heard += 1;
            }
            heard
        });
        let mut lost = 0;
        while begin.elapsed() < Duration::from_millis(500) {
            lost += u32::from(!uplink.carry(&quota, [2; 6], mad.clone()));
        }
        // Its turn comes before what waits of the flood.
        uplink.release([2; 6], [1; 16]);
        let heard: u32 = reader.join().unwrap();
        let most = PACE * (u32::try_from(begin.elapsed().as_millis()).unwrap() / 100 + 2);
        assert!(lost > 0 && heard > 0 && heard <= most, "{heard} of at most {most}, {lost} lost");
    }
}
