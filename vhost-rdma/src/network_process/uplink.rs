//! The process's way to whoever knows all networks: questions, news and datagrams, over a socket
//! that the supervisor gives it.
//!
//! ```text
//!  worker ──────────> Unsaid ──> `uplink` thread ──> wire      never waits; the thread may
//!  command's thread ─ question ─────^   <── Settled ── the process's own thread
//! ```
//!
//! What is to be told is kept in [`Unsaid`], which is never more than there is, however slowly it
//! is read. Queue pairs come and go at the guests' pace, so what is told is what has changed since
//! the last message: one that came and went in between is not told at all. A datagram has a place
//! of its NIC's share until it is sent. All together go at a pace that leaves time for other
//! networks.
//!
//! Who is at the other end may die, and then there is nobody for a moment: datagrams are lost, and
//! who asks is refused in the end. The next one is told again what there is. One that does not read
//! for as long as the wire has patience is hung up on, and counts as dead.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::exchange::{Asked, Datagram, Settled, Told};
use super::protocol::encode;
use super::unsaid::{Held, TooSlow, Unsaid};
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

/// What there is to say, and to whom.
#[derive(Default)]
struct Talk {
    /// To whoever is at the other end.
    line: Option<Arc<Wire>>,
    unsaid: Unsaid,
    over: bool,
}

impl Talk {
    /// There is nobody at the other end.
    fn detach(&mut self) -> Option<Arc<Wire>> {
        self.unsaid.end();
        self.line.take()
    }
}

/// What the thread and everybody else share.
#[derive(Default)]
struct Shared {
    talk: Mutex<Talk>,
    more: Condvar,
}

/// Who waits for answers, by the numbers of their questions.
type Waiting = Mutex<(u64, BTreeMap<u64, SyncSender<Settled>>)>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// See the module.
pub(super) struct ToOutside {
    shared: Arc<Shared>,
    waiting: Waiting,
}

impl ToOutside {
    /// Starts the thread, and waits until it has sealed itself.
    ///
    /// # Errors
    /// The host refuses a thread, or it could not be sealed.
    pub(super) fn start(seal: Option<Seal>) -> io::Result<Arc<Self>> {
        let shared = Arc::<Shared>::default();
        let own = shared.clone();
        let (ready, sealed) = sync_channel(1);
        let thread = std::thread::Builder::new().name("uplink".to_owned());
        thread.spawn(move || {
            let done = seal.map_or(Ok(()), |seal| seal());
            let go_on = done.is_ok();
            // Whoever started the thread waits for it.
            let _ = ready.send(done);
            if go_on {
                own.run();
            }
        })?;
        sealed.recv().map_err(io::Error::other)??;
        Ok(Arc::new(Self { shared, waiting: Waiting::default() }))
    }

    /// Speaks by this wire from now on, to somebody who knows nothing yet; `held` are the addresses
    /// of NICs here.
    pub(super) fn attach(&self, wire: Arc<Wire>, held: Vec<(Mac, Gid)>) {
        let held = Held::new(held);
        let old = {
            let mut talk = lock(&self.shared.talk);
            talk.unsaid.begin(held);
            talk.line.replace(wire)
        };
        self.shared.more.notify_all();
        // The thread may wait for whoever was there.
        if let Some(old) = old {
            old.hang_up();
        }
    }

    /// There is nobody at the other end.
    pub(super) fn detach(&self) {
        lock(&self.shared.talk).detach();
    }

    /// An answer has come.
    pub(super) fn settle(&self, number: u64, settled: Settled) {
        if let Some(waiting) = lock(&self.waiting).1.remove(&number) {
            // There is room for one, and one comes.
            let _ = waiting.try_send(settled);
        }
    }

    /// Changes what there is to say.
    fn say<T>(&self, change: impl FnOnce(&mut Talk) -> T) -> T {
        let result = change(&mut lock(&self.shared.talk));
        self.shared.more.notify_all();
        result
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
        self.say(|talk| talk.unsaid.ask(number, asked));
        let settled = answered.recv_timeout(PATIENCE).ok();
        lock(&self.waiting).1.remove(&number);
        lock(&self.shared.talk).unsaid.cancel(number);
        settled
    }

    fn address(&self, nic: Mac, gid: Gid, has: bool) {
        let slow = self.say(|talk| match talk.unsaid.address(nic, gid, has) {
            Ok(()) => None,
            Err(TooSlow) => talk.detach(),
        });
        if let Some(wire) = slow {
            tracing::error!("who knows all networks does not keep up, and is told nothing more");
            wire.hang_up();
        }
    }
}

impl Drop for ToOutside {
    fn drop(&mut self) {
        self.say(|talk| talk.over = true);
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
        self.address(nic, gid, true);
    }

    fn release(&self, nic: Mac, gid: Gid) {
        self.address(nic, gid, false);
    }

    fn queue_pair(&self, device: &str, qpn: u32, is_there: bool) {
        self.say(|talk| talk.unsaid.queue_pair(device, qpn, is_there));
    }

    fn find(&self, gid: Gid) {
        self.say(|talk| {
            if talk.line.is_some() {
                talk.unsaid.want(gid);
            }
        });
    }

    fn peer(&self, device: &str, gid: Gid, qpn: u32) -> Option<Far> {
        match self.ask(Asked::Peer { device: device.to_owned(), gid, qpn })? {
            Settled::Peer(far) => Some(far),
            Settled::Address(_) => None,
        }
    }

    fn carry(&self, quota: &NicQuota, nic: Mac, mad: Mad) -> bool {
        let Some(place) = quota.take() else { return false };
        let told = Told::Datagram(nic, Datagram::of(&mad));
        self.say(|talk| {
            let is_heard = talk.line.is_some();
            if is_heard {
                talk.unsaid.datagram(told, place);
            }
            is_heard
        })
    }
}

impl Shared {
    /// Says what there is to say, until nobody has more.
    fn run(&self) {
        let (mut since, mut count) = (Instant::now(), 0);
        while let Some((wire, told, _place)) = self.next() {
            match encode(&told) {
                Ok(bytes) => self.send(&wire, &bytes),
                Err(error) => tracing::error!(%error, "it cannot be told"),
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

    /// What to say next, and to whom; waits for it.
    fn next(&self) -> Option<(Arc<Wire>, Told, Option<QuotaPermit>)> {
        let mut talk = lock(&self.talk);
        while !talk.over {
            if let Some(wire) = talk.line.clone()
                && let Some((told, place)) = talk.unsaid.next()
            {
                return Some((wire, told, place));
            }
            talk = self.more.wait(talk).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Who does not read is given up. There is another one soon, or the end.
    fn send(&self, wire: &Arc<Wire>, bytes: &[u8]) {
        let Err(error) = wire.send(bytes, &[]) else { return };
        if error.kind() == io::ErrorKind::WouldBlock {
            tracing::error!("who knows all networks does not read, and is told nothing more");
        } else {
            tracing::debug!(%error, "nobody listens");
        }
        let mut talk = lock(&self.talk);
        if talk.line.as_ref().is_some_and(|line| Arc::ptr_eq(line, wire)) {
            talk.detach();
        }
        drop(talk);
        wire.hang_up();
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

    fn mad() -> Mad {
        let bytes = [0; MAD_LEN];
        Mad { source: [1; 16], dest: [2; 16], traffic_class: 0, sl: 0, bytes }
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
    fn who_never_reads_costs_no_more_than_there_is_to_tell() {
        let (outside, uplink) = uplink();
        let device = "a_device_of_the_host";
        // Ten queue pairs at a time.
        for qpn in 0..1_000_000 {
            uplink.queue_pair(device, qpn, true);
            uplink.queue_pair(device, qpn.wrapping_sub(10), false);
        }
        let kept = lock(&uplink.shared.talk).unsaid.len();
        // And those of which the socket has what came, and not yet what went.
        assert!(kept < 200_000, "{kept}");
        drop(outside);
        uplink.detach();
        let next = attach(&uplink, vec![]);
        let Told::Queues { new, gone, .. } = told(&next) else { panic!("no queue pairs") };
        assert_eq!((new, gone), ((999_990..1_000_000).collect(), vec![]));
    }

    #[test]
    fn who_does_not_read_is_hung_up_on_and_the_next_is_told_all() {
        let uplink = ToOutside::start(None).unwrap();
        let (outside, far) = Wire::pair().unwrap();
        let wire = Arc::new(Wire::new(far));
        wire.set_patience(Duration::from_millis(50)).unwrap();
        uplink.attach(wire, vec![]);
        let begin = Instant::now();
        // There is always one more to tell of, until nobody is told.
        let mut qpn = 0;
        while lock(&uplink.shared.talk).line.is_some() {
            qpn += 1;
            uplink.queue_pair("a", qpn, true);
            std::thread::sleep(Duration::from_micros(50));
            assert!(begin.elapsed() < Duration::from_mins(1), "there is no end to the patience");
        }
        while outside.receive().unwrap().is_some() {}
        assert!(!uplink.carry(&NicQuota::default(), [2; 6], mad()), "there is nobody");
        let next = attach(&uplink, vec![]);
        let mut new = Vec::new();
        while new.len() < qpn as usize {
            let Told::Queues { new: some, gone, .. } = told(&next) else { panic!("others") };
            assert!(gone.is_empty());
            new.extend(some);
        }
        assert_eq!(new, (1..=qpn).collect::<Vec<_>>());
    }

    #[test]
    fn another_wire_takes_the_place_of_one_that_is_not_read() {
        let (outside, uplink) = uplink();
        let quota = NicQuota::default();
        // Until the thread waits for the one who does not read.
        let begin = Instant::now();
        let mut lost = 0;
        while lost < 100 {
            lost += u32::from(!uplink.carry(&quota, [2; 6], mad()));
            std::thread::sleep(Duration::from_millis(1));
            assert!(begin.elapsed() < Duration::from_mins(1), "there is no end to the room");
        }
        let next = attach(&uplink, vec![([2; 6], [1; 16])]);
        assert_eq!(told(&next), Told::Asked(None, Asked::Address([2; 6], [1; 16])));
        while outside.receive().unwrap().is_some() {}
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
            lost += u32::from(!uplink.carry(&quota, [2; 6], mad()));
        }
        // Its turn comes before what waits of the flood.
        uplink.release([2; 6], [1; 16]);
        let heard: u32 = reader.join().unwrap();
        let most = PACE * (u32::try_from(begin.elapsed().as_millis()).unwrap() / 100 + 2);
        assert!(lost > 0 && heard > 0 && heard <= most, "{heard} of at most {most}, {lost} lost");
    }
}
