//! What a process says, and one that refuses.

use std::os::unix::net::UnixStream;

use rustix::fs::{MemfdFlags, memfd_create};

use super::super::calls::tests;
use super::super::estate::Left;
use super::super::network::Network;
use super::super::state::Known;
use super::*;
use crate::network_process::{Numbered, TEXT_MAX};
use crate::node::{Backing, Guests, MacAddr, NicConfig, NicLimits, SocketAccess};

fn nic(name: &str, last: u8) -> NicConfig {
    NicConfig {
        number: 0,
        name: name.to_owned(),
        network: "net".to_owned(),
        vni: 1,
        mac: MacAddr::local([2, 0, 0, 0, 0, last]),
        addresses: Vec::new(),
        virtio_id: None,
        comp_vectors: 1,
        limits: NicLimits::default(),
        backing: Backing::Soft,
        guests: Guests::Vm,
        socket: format!("/nonexistent/{name}/vhost.sock").into(),
        access: SocketAccess::default(),
        configured: false,
    }
}

/// One that says nothing by itself: who has the other end of `wire` speaks for it.
fn process(wire: Wire) -> Process {
    let child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let kept = (Store::default(), String::new());
    let (told, refused, handed) = (BTreeSet::new(), BTreeMap::new(), BTreeSet::new());
    Process { child, wire: Arc::new(wire), kept, told, refused, handed }
}

#[test]
fn what_a_process_says_is_a_line_for_people_however_it_says_it() {
    let (csi, escape) = ("\u{9b}".repeat(50 << 10), "\x1b[2J\n".repeat(4 << 10));
    let reason = encode(&Report::Answer(1, Answer::Refused(escape.clone()))).unwrap();
    let name = [&b"{\""[..], csi.as_bytes(), b"\":1}"].concat();
    let said = |bytes: Vec<u8>| {
        let understood = understand(Packet { bytes, files: vec![], files_lost: false });
        match understood.map(|(report, _)| report) {
            Ok(Report::Answer(_, Answer::Refused(why))) => why,
            Ok(report) => panic!("{report:?}"),
            Err(error) => error.to_string(),
        }
    };
    // What is logged as it was said, and what becomes a NIC's error.
    for why in [said(name), said(reason)] {
        let trouble = tell(&format!("is not to be trusted: {why}"), true, Duration::ZERO);
        for text in [why, trouble] {
            let length = text.chars().count();
            assert!(length <= TEXT_MAX + 100, "{length} characters");
            assert!(!text.chars().any(char::is_control), "{text:?}");
        }
    }
    let trouble = tell(&escape, false, Duration::ZERO);
    assert!(trouble.chars().count() <= TEXT_MAX + 100 && !trouble.contains('\x1b'));
    assert!(trouble.ends_with("next in 0ns"), "{trouble}");
}

#[test]
fn whoever_talks_without_end_waits() {
    let begin = Instant::now();
    let mut pace = Pace::new(begin);
    for _ in 1..PACE {
        assert_eq!(pace.next(begin, 0), Duration::ZERO);
    }
    assert_eq!(pace.next(begin, 0), Duration::from_secs(1));
    assert_eq!(pace.next(begin + Duration::from_secs(1), 0), Duration::ZERO);
}

/// A VMM that says something harmless over and over has a page begun for every 64 messages.
#[test]
fn the_service_manager_is_told_seldom_for_long() {
    let begin = Instant::now();
    let mut pace = Pace::new(begin);
    for _ in 0..TURNS_AT_ONCE {
        assert_eq!(pace.next(begin, 1), Duration::ZERO);
    }
    let (mut now, mut told) = (begin, 0);
    while now < begin + Duration::from_secs(100) {
        now += pace.next(now, 1);
        told += 1;
    }
    assert!(told <= 100 * (TURNS + 2), "{told}");
    // Who says little is not held back.
    for second in 0..60 {
        let now = now + Duration::from_secs(60 + second);
        assert_eq!(pace.next(now, 1), Duration::ZERO);
    }
}

/// As when the device of one of its NICs has gone.
#[test]
fn a_nic_that_cannot_be_had_any_more_takes_no_other_along() {
    let shared = tests::shared();
    for (name, last) in [("gone", 1), ("there", 2)] {
        let nic = nic(name, last);
        shared.state().nics.insert(name.to_owned(), Known::of(&nic));
    }
    let (near, far) = Wire::pair().unwrap();
    let far = Wire::new(far);
    let answers = std::thread::spawn(move || {
        let mut added = Vec::new();
        while let Ok(Some(packet)) = far.receive() {
            let Numbered { id, request } = decode(&packet.bytes).unwrap();
            let answer = match request {
                Request::Add(nic) if nic.name == "gone" => Answer::Refused("no device".into()),
                Request::Add(nic) => {
                    added.push(nic.name);
                    Answer::Done
                }
                other => panic!("{other:?}"),
            };
            far.send(&encode(&Report::Answer(id, answer)).unwrap(), &[]).unwrap();
        }
        added
    });
    let mut process = process(near);
    process.add_nics(&shared).unwrap();
    assert_eq!(process.refused.keys().collect::<Vec<_>>(), ["gone"]);
    assert!(process.refused["gone"].contains("no device"));
    // A restart that would lose it is not for that; one that finds it lost already is.
    assert!(process.loses(&shared).is_some_and(|why| why.contains("gone")));
    shared.state().nics.get_mut("gone").unwrap().refused = Some("no device".to_owned());
    assert_eq!(process.loses(&shared), None);
    drop(process);
    assert_eq!(answers.join().unwrap(), ["there"]);
}

/// One that talks all the time and never answers.
#[test]
fn who_says_anything_but_the_answer_is_given_up() {
    let shared = tests::shared();
    let (near, far) = Wire::pair().unwrap();
    let far = Wire::new(far);
    let talks = std::thread::spawn(move || {
        let begun = encode(&Report::Begun(1)).unwrap();
        while far.send(&begun, &[]).is_ok() {}
    });
    let mut process = process(near);
    let begin = Instant::now();
    let asked = process.ask(&shared, Request::Run, &[]);
    assert_eq!(asked.unwrap_err().to_string(), "it does not answer");
    assert!(begin.elapsed() < START + Duration::from_secs(3), "{:?}", begin.elapsed());
    // And whoever wants the network's end need not wait for that.
    shared.state().starting = Some(process.wire.clone());
    shared.give_up();
    talks.join().unwrap();
}

#[test]
fn descriptors_of_other_kinds_are_no_memory_and_no_signal() {
    let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let (pipe, _) = io::pipe().unwrap();
    let piece = crate::device::Piece { start: 0, len: 4096, vmm: 0, offset: 0 };
    for change in [Change::Kick(0), Change::Call(0), Change::Plugged(piece)] {
        let report = Report::Changed(1, change);
        let files = |file: &dyn Fn() -> OwnedFd| vec![file()];
        assert!(check_kinds(&report, &files(&|| null.try_clone().unwrap())).is_err());
        assert!(check_kinds(&report, &files(&|| pipe.try_clone().unwrap().into())).is_err());
    }
    let signal = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let memory = memfd_create("m", MemfdFlags::CLOEXEC).unwrap();
    let told = |change, file| check_kinds(&Report::Changed(1, change), &[file]);
    told(Change::Kick(0), signal).unwrap();
    told(Change::Plugged(piece), memory).unwrap();
}

fn memory() -> OwnedFd {
    memfd_create("m", MemfdFlags::CLOEXEC).unwrap()
}

/// Waits until a network is so.
fn eventually(shared: &Shared, is_so: impl Fn(&State) -> bool) {
    let begin = Instant::now();
    while !is_so(&shared.state()) {
        assert!(begin.elapsed() < Duration::from_secs(20), "it is not so");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// An upgrade comes just when the next process is told of a session.
#[test]
fn a_session_on_its_way_to_the_next_process_is_handed_down() {
    let network = Network::of(tests::shared());
    let shared = network.shared();
    shared.state().nics.insert("n".to_owned(), Known::of(&nic("n", 1)));
    let (_vmm, end) = tests::hold(shared, 1);
    // As many as are told without an answer.
    for start in 0..UNANSWERED as u64 {
        let piece = crate::device::Piece { start, len: 4096, vmm: 0, offset: 0 };
        let plugged = Change::Plugged(piece);
        shared.state().held(1, |held| drop(held.take(plugged, vec![memory()], false)));
    }
    // The other end answers nothing.
    let (near, _far) = Wire::pair().unwrap();
    let mut process = process(near);
    let store = Store::own();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            process.can_be_reached(shared).unwrap();
            assert!(process.take_over(shared).is_err(), "it was hung up on");
            process.hear_out(shared);
            over(shared, shared.state());
        });
        eventually(shared, |state| state.sessions.is_empty());
        network.hand_down(&store).unwrap();
    });
    let names: Vec<String> = store.take().into_iter().map(|(name, _)| name).collect();
    let has = |what: &str| names.iter().any(|name| name.starts_with(what) && name.ends_with("@n"));
    assert!(has("stream.") && has("ledger."), "{names:?}");
    assert!(end.try_recv().is_err(), "it goes on");
    // And nobody is started for a daemon that becomes another one.
    let (near, _far) = Wire::pair().unwrap();
    assert!(self::process(near).can_be_reached(shared).is_err());
}

/// A daemon that comes after another finds a process that dies while it is told of a session.
#[test]
fn a_session_whose_process_dies_while_it_is_told_of_it_is_the_next_ones() {
    let network = Network::of(tests::shared());
    let shared = network.shared();
    shared.state().nics.insert("n".to_owned(), Known::of(&nic("n", 1)));
    let (near, far) = Wire::pair().unwrap();
    shared.state().wire = Some(Arc::new(near));
    let (vmm, stream) = UnixStream::pair().unwrap();
    let connection = std::thread::scope(|scope| {
        let dies = scope.spawn(|| {
            let asked = Wire::new(far).receive().unwrap().unwrap();
            let Numbered { request, .. } = decode(&asked.bytes).unwrap();
            assert!(matches!(request, Request::TakeUp(..)), "{request:?}");
            // Its keeper notices.
            let wire = shared.state().wire.clone().unwrap();
            wire.receive().unwrap();
            mourn(shared.state());
        });
        let connection = network.resume("n", Left::of(stream)).unwrap();
        dies.join().unwrap();
        connection
    });
    assert_eq!(shared.state().sessions.len(), 1, "nobody has it");
    let (near, far) = Wire::pair().unwrap();
    let next = std::thread::spawn(|| answered(far));
    let mut process = process(near);
    process.hand_on(shared).unwrap();
    assert!(process.be_found(shared).unwrap());
    // Another daemon is started when there is no process yet, and its session comes late.
    let (late, stream) = UnixStream::pair().unwrap();
    drop((process, shared.state().wire.take()));
    let told = next.join().unwrap();
    assert!(matches!(told[..], [Request::TakeUp(..), Request::GoOn(_)]), "{told:?}");
    let (near, far) = Wire::pair().unwrap();
    let next = std::thread::spawn(|| answered(far));
    let mut process = self::process(near);
    process.hand_on(shared).unwrap();
    shared.state().nics.insert("m".to_owned(), Known::of(&nic("m", 2)));
    let second = network.resume("m", Left::of(stream)).unwrap();
    assert!(process.be_found(shared).unwrap());
    drop((process, shared.state().wire.take()));
    let told = next.join().unwrap();
    assert_eq!(told.len(), 4, "{told:?}");
    network.ending();
    drop((vmm, late));
    assert_eq!((connection.end(), second.end()), (Ending::Closed, Ending::Closed));
}

/// What a process is asked that does all of it.
fn answered(far: OwnedFd) -> Vec<Request> {
    let far = Wire::new(far);
    let mut asked = Vec::new();
    while let Ok(Some(packet)) = far.receive() {
        let Numbered { id, request } = decode(&packet.bytes).unwrap();
        far.send(&encode(&Report::Answer(id, Answer::Done)).unwrap(), &[]).unwrap();
        asked.push(request);
    }
    asked
}

/// One session has gone on, and its VMM says something, when the process dies over the next one.
#[test]
fn what_a_process_told_before_it_failed_to_start_counts() {
    let shared = tests::shared();
    let (_busy, busy) = tests::hold(&shared, 1);
    let (_quiet, quiet) = tests::hold(&shared, 2);
    let (near, far) = Wire::pair().unwrap();
    let far = Wire::new(far);
    let dies = std::thread::spawn(move || {
        while let Ok(Some(packet)) = far.receive() {
            let Numbered { id, request } = decode(&packet.bytes).unwrap();
            let say = |report: &Report| far.send(&encode(report).unwrap(), &[]).unwrap();
            if matches!(request, Request::GoOn(2)) {
                say(&Report::Begun(1));
                return;
            }
            say(&Report::Answer(id, Answer::Done));
        }
    });
    let mut process = process(near);
    process.hand_over(&shared, 1).unwrap();
    let id = process.say(&shared, Request::GoOn(2), &[]).unwrap();
    assert!(id > 0);
    dies.join().unwrap();
    // It is found dead before what it told is read.
    assert!(process.hand_over(&shared, 2).is_err());
    process.hear_out(&shared);
    mourn(shared.state());
    assert!(matches!(busy.try_recv(), Ok(Ending::Broken(_))), "its message is lost");
    assert!(quiet.try_recv().is_err(), "it goes on");
}

/// The one that serves dies while another is to stand by for it.
#[test]
fn a_restart_that_comes_when_the_process_dies_leaves_nobody_standing_by() {
    let network = Network::of(tests::shared());
    let shared = network.shared();
    let (_vmm, _end) = tests::hold(shared, 1);
    let wire = || {
        let (near, far) = Wire::pair().unwrap();
        shared.state().wire = Some(Arc::new(near));
        shared.wake();
        far
    };
    let _first = wire();
    std::thread::scope(|scope| {
        let renewing = scope.spawn(|| network.renew());
        eventually(shared, |state| state.standby == Standby::Wanted);
        mourn(shared.state());
        shared.wake();
        // As long as it takes at least.
        std::thread::sleep(Duration::from_millis(100));
        let _next = wire();
        let renewed = renewing.join().unwrap().unwrap();
        assert_eq!((renewed.kept, renewed.lost), (vec![], vec!["n".to_owned()]));
    });
    assert_eq!(shared.state().standby, Standby::No);
    assert!(shared.state().legacy.is_none());
}

/// Has the keeper end, also where a test fails.
struct Stops<'a>(&'a Shared);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.state().stopping = true;
        self.0.wake();
        self.0.give_up();
    }
}

/// What is started is this test program, which has no such test and ends.
#[test]
fn what_is_handed_on_waits_for_a_process_that_starts() {
    let mut shared = tests::shared();
    shared.start.network = "nothing-is-called-so".to_owned();
    let nics = std::iter::once("n".to_owned()).collect();
    shared.state().legacy = Some(Legacy { file: memory(), nics });
    std::thread::scope(|scope| {
        scope.spawn(|| run(&shared));
        let _ends = Stops(&shared);
        eventually(&shared, |state| state.restarts.deaths() >= 3);
        let state = shared.state();
        assert!(state.trouble.is_some(), "nobody is told");
        assert!(state.legacy.is_some(), "it is lost");
        // Each took twice as long as the one before.
        assert_eq!(state.lives, state.restarts.deaths());
    });
    assert!(shared.state().over);
}

/// It was told of the NIC before that was removed, and nobody could tell it since.
#[test]
fn a_nic_that_was_removed_while_the_process_started_is_taken_from_it() {
    let shared = tests::shared();
    for (name, last) in [("goes", 1), ("stays", 2)] {
        shared.state().nics.insert(name.to_owned(), Known::of(&nic(name, last)));
    }
    let (near, far) = Wire::pair().unwrap();
    let far = Wire::new(far);
    let answers = std::thread::spawn(move || {
        let mut removed = Vec::new();
        while let Ok(Some(packet)) = far.receive() {
            let Numbered { id, request } = decode(&packet.bytes).unwrap();
            if let Request::Remove(name) = request {
                removed.push(name);
            }
            far.send(&encode(&Report::Answer(id, Answer::Done)).unwrap(), &[]).unwrap();
        }
        removed
    });
    let mut process = process(near);
    process.add_nics(&shared).unwrap();
    shared.state().nics.remove("goes");
    assert!(process.be_found(&shared).unwrap());
    assert!(shared.state().wire.is_some());
    drop(shared.state().wire.take());
    drop(process);
    assert_eq!(answers.join().unwrap(), ["goes"]);
}
