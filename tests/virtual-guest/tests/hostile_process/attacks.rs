//! Every attack of the library that a process can carry out.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::scene::{BUDGET, Scene};
use crate::suffer::attacks;

attacks! {
    elements elements_cold elements_read elements_empty
    srq_modify cq_resize cq_overrun
    multicast multicast_dropped multicast_by_8 ah_churn
    pd_destroy context_ends qp_churn mr_churn context_churn cq_churn
    writes_1m writes_1m_by_8 small_writes flush
    rnr_timers ack_timers kicks doorbells
    unplug plug
    holes cold_writes punching cuts huge_holes hugetlb_holes
    sessions messages shares channels jobs connects
    hangs unmaps wrong_files execs bomb
}

/// What the attack `execs` starts.
#[test]
#[ignore = "run by the attack `execs`, as a process of its own"]
fn becomes_another() {
    virtual_guest::attack::become_another();
}

/// What all cases rest on: a worker that stands still for a while makes its bystanders fail.
#[test]
fn a_worker_that_stands_still_is_noticed() {
    let scene = Scene::new(BUDGET);
    let daemon = &scene.world.daemon;
    let worker = daemon.pid_of("net").unwrap_or_else(|| daemon.pid());
    let worker = Pid::from_raw(worker as i32).unwrap();
    let stands_still = || {
        kill_process(worker, Signal::STOP).unwrap();
        std::thread::sleep(Duration::from_millis(600));
        kill_process(worker, Signal::CONT).unwrap();
    };
    assert!(catch_unwind(AssertUnwindSafe(|| scene.during(stands_still))).is_err());
    scene.during(|| std::thread::sleep(Duration::from_millis(300)));
    scene.verdict();
}
