//! A worker that is late, and what a guest is answered meanwhile.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::device::nic::settings;
use crate::device::queues::QueueLayout;
use crate::eventfd;
use crate::node::{Backing, Guests, KICK_QUEUES, MacAddr, NicConfig, NicLimits, SocketAccess};
use crate::worker::{WorkerConfig, Workers};

const STALL: Duration = Duration::from_millis(3500);

fn config() -> NicConfig {
    NicConfig {
        number: 0,
        name: "late".to_owned(),
        network: "net".to_owned(),
        vni: 1,
        mac: MacAddr::local([2, 0, 0, 0, 0, 1]),
        addresses: Vec::new(),
        virtio_id: None,
        comp_vectors: 1,
        limits: NicLimits::default(),
        backing: Backing::Soft,
        guests: Guests::Vm,
        socket: "/nonexistent/late/vhost.sock".into(),
        access: SocketAccess::default(),
        configured: false,
    }
}

/// A session of a NIC on the first of `workers`.
fn session(workers: &Workers) -> Session {
    let worker = &workers.handles()[0];
    let layout = QueueLayout::new(1, KICK_QUEUES).expect("a layout");
    let given = settings(&config(), layout);
    let added = worker.call(None, PATIENCE, move |shard, _| shard.add_nic(given, Box::new(NoPort)));
    let nic = Nic::new(&config(), layout, (0, worker.clone()), added.expect("a NIC"));
    Session::new(Arc::new(nic), Watch::start().expect("a thread"))
}

#[test]
fn a_vmm_that_is_to_rest_is_told_of_answers_later() {
    let workers = Workers::start(WorkerConfig::default()).expect("a worker");
    let session = session(&workers);
    let vring = Vring::new(16).expect("a queue");
    let vmm = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor");
    vring.set_call(Some(File::from(vmm.try_clone().expect("a copy"))));
    let trust = session.nic.trust.clone();
    let notifier = Notifier::new(vec![vring.clone()], trust, session.watch.clone());
    assert!(session.notifier.set(notifier).is_ok());
    session.tell(&vring);
    assert!(eventfd::take(vmm.as_fd()).expect("a counter"), "whoever behaves is told at once");
    session.nic.trust.took(Duration::from_millis(400));
    let begin = Instant::now();
    session.tell(&vring);
    while !eventfd::take(vmm.as_fd()).expect("a counter") {
        assert!(begin.elapsed() < 10 * STALL, "it is not told at all");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(begin.elapsed() > Duration::from_millis(300), "{:?}", begin.elapsed());
}

#[test]
fn a_worker_that_is_late_costs_no_guest_its_device() {
    let workers = Workers::start(WorkerConfig::default()).expect("a worker");
    let worker = &workers.handles()[0];
    let session = session(&workers);
    assert!(worker.post(None, |_, _| thread::sleep(STALL)));
    let begin = Instant::now();
    let asked = session.execute(0, 0, Command::Keepalive);
    assert!(matches!(asked, Outcome::Done(Ok(Step::Done(Reply::Done)))), "{asked:?}");
    assert!(begin.elapsed() < STALL, "the device is there, however late its worker");
    // What only the worker can do waits for it, and a pause does.
    let done = session.execute(0, 0, Command::QueryPort);
    assert!(matches!(done, Outcome::Done(Err(Status::STATE))), "its queue does not run: {done:?}");
    assert!(begin.elapsed() >= STALL, "it was answered by whoever did not know");
    assert!(worker.post(None, |_, _| thread::sleep(STALL / 2)));
    session.stop_vring(u32::from(vq::CONTROL)).expect("a pause that is late is a pause");
}
