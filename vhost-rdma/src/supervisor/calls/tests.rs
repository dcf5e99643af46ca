use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};

use proptest::prelude::*;
use rustix::event::EventfdFlags;

use super::super::held::Held;
use super::super::ledger::{Ledger, Whose};
use super::super::record::Record;
use super::*;
use crate::aside::tests::slow;
use crate::device::{Change, Piece, Place};
use crate::network_process::{VERSION, decode};
use crate::node::Ending;
use crate::telemetry::LogFormat;

pub(in crate::supervisor) fn shared() -> Shared {
    let (network, log_format) = ("net".to_owned(), LogFormat::Text);
    let qpns = crate::qpn::Key::default();
    let start = Start {
        version: VERSION,
        network,
        workers: 1,
        poll_us: 10,
        log_format,
        log: None,
        qpns,
        rnic: false,
    };
    let (store, state) = (Store::default(), Mutex::default());
    let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let cgroup = Cgroup::default();
    let bell = Arc::new(bell);
    Shared { start, store, cgroup, state, changed: Condvar::new(), bell, branch: None }
}

/// Session `id`, and what is told at its end.
pub(in crate::supervisor) fn hold(shared: &Shared, id: u64) -> (UnixStream, Receiver<Ending>) {
    let (near, far) = UnixStream::pair().unwrap();
    let (ended, end) = channel();
    let nic = "n".to_owned();
    let ledger = Ledger::new(&shared.store, Whose::default(), None);
    let held = Held { nic, stream: near, record: Record::default(), ledger, ended };
    shared.state().sessions.insert(id, held);
    (far, end)
}

fn change() -> impl Strategy<Value = (Change, usize)> {
    let queue = 0u32..36;
    let piece =
        any::<(u64, u64, u64)>().prop_map(|(start, len, vmm)| Piece { start, len, vmm, offset: 0 });
    prop_oneof![
        any::<u64>().prop_map(|features| (Change::Features(features), 0)),
        Just((Change::Reset, 0)),
        piece.prop_map(|piece| (Change::Plugged(piece), 1)),
        any::<u64>().prop_map(|start| (Change::Unplugged(start), 0)),
        (queue.clone(), any::<u32>()).prop_map(|(q, size)| (Change::Size(q, size), 0)),
        (queue.clone(), any::<(u64, u64, u64)>()).prop_map(|(q, at)| {
            let place = Place { descriptors: at.0, used: at.1, available: at.2 };
            (Change::Place(q, place), 0)
        }),
        (queue.clone(), 0usize..2).prop_map(|(q, files)| (Change::Kick(q), files)),
        (queue.clone(), 0usize..2).prop_map(|(q, files)| (Change::Call(q), files)),
        (queue, any::<u32>()).prop_map(|(q, at)| (Change::Stopped(q, at), 0)),
    ]
}

fn report() -> impl Strategy<Value = (Report, usize)> {
    let id = 0u64..4;
    prop_oneof![
        (id.clone(), Just(Answer::Done)).prop_map(|(id, a)| (Report::Answer(id, a), 0)),
        id.clone().prop_map(|id| (Report::Begun(id), 0)),
        Just((Report::Short, 0)),
        id.clone().prop_map(|id| (Report::Done(id), 0)),
        id.clone().prop_map(|id| (Report::Ended(id, Ending::Closed), 0)),
        (id, change()).prop_map(|(id, (change, files))| (Report::Changed(id, change), files)),
    ]
}

proptest! {
    /// Whatever a process tells, in whatever order, of sessions that there are or are not.
    #[test]
    fn no_tale_does_harm(tale in proptest::collection::vec(report(), 0..200)) {
        let shared = shared();
        let ends: Vec<_> = (1..3).map(|id| hold(&shared, id)).collect();
        for (mut report, count) in tale {
            prop_assert!(report.check(count).is_ok(), "{report:?}");
            let null = || File::open("/dev/null").map(OwnedFd::from);
            let files = (0..count).map(|_| null().unwrap()).collect();
            shared.take(report, (files, false));
        }
        let mut state = shared.state();
        prop_assert!(state.sessions.keys().all(|id| (1..3).contains(id)), "one came of nothing");
        for held in state.sessions.values() {
            prop_assert!(held.record.changes().len() < 36 * 6 + 509 + 2);
        }
        let over = state.mourn();
        drop(state);
        over.into_iter().for_each(|(held, ending)| held.end(ending));
        for (id, (_vmm, end)) in (1..).zip(ends) {
            let goes_on = shared.state().sessions.contains_key(&id);
            prop_assert_eq!(goes_on, end.try_recv().is_err(), "it goes on, or is told");
        }
    }
}

#[test]
fn a_session_in_the_middle_of_a_message_ends_with_its_process() {
    let shared = shared();
    let (_quiet, quiet) = hold(&shared, 1);
    let (_busy, busy) = hold(&shared, 2);
    let (gone, closed) = hold(&shared, 3);
    shared.take(Report::Begun(1), (Vec::new(), false));
    shared.take(Report::Done(1), (Vec::new(), false));
    shared.take(Report::Begun(2), (Vec::new(), false));
    drop(gone);
    let over = shared.state().mourn();
    over.into_iter().for_each(|(held, ending)| held.end(ending));
    assert!(quiet.try_recv().is_err(), "it goes on");
    assert!(matches!(busy.try_recv(), Ok(Ending::Broken(_))));
    assert_eq!(closed.try_recv(), Ok(Ending::Closed));
}

/// A process that is not itself any more hands on what its VMM has sent.
#[test]
fn what_is_slow_to_close_holds_up_nobody_who_looks() {
    const LONG: Duration = Duration::from_secs(5);
    let shared = shared();
    let (_vmm, end) = hold(&shared, 1);
    let begin = Instant::now();
    let mut peers = Vec::new();
    let mut tell = |id, change| {
        let (file, peer) = slow(LONG);
        peers.push(peer);
        shared.take(Report::Changed(id, change), (vec![file], false));
        drop(shared.state());
    };
    tell(1, Change::Kick(0));
    tell(1, Change::Kick(0));
    tell(1, Change::Plugged(Piece { start: 0, len: 4096, vmm: 1, offset: 0 }));
    // There is no such session.
    tell(2, Change::Kick(0));
    let memory = Change::Memory(Vec::new());
    shared.take(Report::Changed(1, memory), (Vec::new(), false));
    shared.take(Report::Ended(1, Ending::Closed), (Vec::new(), false));
    assert_eq!(end.try_recv(), Ok(Ending::Closed));
    drop(shared.state());
    assert!(begin.elapsed() < LONG / 2, "{:?}", begin.elapsed());
}

/// Another process may be there before those who waited for the first one have heard of its end.
#[test]
fn a_change_that_is_lost_does_not_end_the_next_process() {
    let shared = shared();
    let ((old, _far), (new, next)) = (Wire::pair().unwrap(), Wire::pair().unwrap());
    shared.state().wire = Some(Arc::new(old));
    let Ok(change) = shared.begin(Request::Remove("n".to_owned())) else { panic!("it is there") };
    {
        let mut state = shared.state();
        state.wire = Some(Arc::new(new));
        state.pending.clear();
    }
    assert!(matches!(shared.carried_out(change), Err(Undone::Lost(_))));
    let next = Wire::new(next);
    next.set_hearing(Duration::from_millis(20)).unwrap();
    let heard = next.receive().map(|packet| packet.is_some());
    assert_eq!(heard.map_err(|error| error.kind()), Err(io::ErrorKind::WouldBlock));
}

#[test]
fn a_process_that_owes_an_answer_is_not_waited_for_again() {
    let shared = shared();
    let (near, far) = Wire::pair().unwrap();
    shared.state().wire = Some(Arc::new(near));
    let far = Wire::new(far);
    let ask = || {
        let begin = Instant::now();
        (shared.glance(Request::Figures).is_some(), begin.elapsed())
    };
    let answer = || {
        let asked = far.receive().unwrap().unwrap();
        let Numbered { id, .. } = decode(&asked.bytes).unwrap();
        shared.take(Report::Answer(id, Answer::Done), (Vec::new(), false));
    };
    let (answered, took) = ask();
    assert!(!answered && took >= GLANCE, "{took:?}");
    for _ in 0..4 {
        std::thread::sleep(GLANCE / 2);
        let (answered, took) = ask();
        assert!(!answered && took < GLANCE / 2, "{took:?}");
    }
    assert_eq!(shared.state().pending.len(), 1, "it was asked once");
    // It has answered, and is asked again.
    answer();
    std::thread::scope(|scope| {
        scope.spawn(answer);
        assert!(ask().0);
    });
    assert!(shared.state().pending.is_empty() && !shared.state().is_late());
    // Another process owes nothing.
    assert!(!ask().0 && shared.state().is_late());
    assert!(shared.state().mourn().is_empty());
    assert!(!shared.state().is_late());
}
