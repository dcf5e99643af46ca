//! Keys that are guessed, old, or another's.

use std::time::{Duration, Instant};

use virtual_guest::backing::rules;
use virtual_guest::daemon::tries;
use virtual_guest::guest::GuestConfig;
use virtual_guest::qp::{QpSpec, SendWr};
use virtual_guest::spec::{access, event, qps, qpt, status};

use crate::scene::{Noise, SOON, case, hasty};

/// How long keys are guessed.
const GUESSING: Duration = Duration::from_secs(3);

/// A connection ends with the first wrong key, so a guess costs three commands at least.
#[test]
fn guessing_keys_costs_a_connection_each_and_opens_nothing() {
    case(|scene| {
        let victim = scene.world.node();
        let secret = victim.area_with(4096, access::ALL);
        let villain = scene.villain();
        let (mut a, mut b) = (villain.rc(), victim.rc());
        let mut noise = Noise(0x6e55);
        let (begin, mut guesses) = (Instant::now(), 0u32);
        scene.during(|| {
            while begin.elapsed() < GUESSING || u64::from(guesses) < tries(20) {
                a.qp.reset(&[&a.scq, &a.rcq]).expect("to RESET");
                b.qp.reset(&[&b.scq, &b.rcq]).expect("to RESET");
                a.connect(&b, &hasty());
                b.connect(&a, &hasty());
                // Right but for the key: the number with another low byte, a neighbour, or
                // anything.
                let key = match guesses % 3 {
                    0 => secret.rkey() ^ (1 + noise.next() as u32 % 255),
                    1 => secret.rkey().wrapping_add(0x100),
                    _ => noise.next() as u32,
                };
                if key == secret.rkey() {
                    continue;
                }
                let guess = SendWr::write(1, &[], secret.addr(0), key).inline(&[0xbd; 8]);
                assert_eq!(a.run(&guess).status, status::REM_ACCESS_ERR);
                guesses += 1;
            }
        });
        assert_eq!(secret.bytes(), [0; 4096]);
        if rules().inbound_is_counted {
            assert_eq!(
                victim.guest.query_counters().expect("counters").access_errors,
                u64::from(guesses)
            );
        }
        victim.guest.disconnect();
    });
}

/// Who guesses on an unreliable connection is never told that a key was wrong, so the other side
/// ends it after some.
#[test]
fn an_unreliable_connection_ends_after_some_wrong_keys() {
    case(|scene| {
        let victim = scene.world.node();
        let secret = victim.area_with(4096, access::ALL);
        let villain = scene.villain();
        let spec = QpSpec::new(qpt::UC);
        let (mut a, b) = (villain.end(&spec), victim.end(&spec));
        a.connect(&b, &hasty());
        b.connect(&a, &hasty());
        let mut noise = Noise(0x6e55);
        let begin = Instant::now();
        scene.during(|| {
            while begin.elapsed() < GUESSING {
                for _ in 0..32 {
                    let key = noise.next() as u32;
                    let guess = SendWr::write(1, &[], secret.addr(0), key).inline(&[0xbd; 8]);
                    a.qp.queue_send(&guess);
                }
                a.qp.ring_sq();
                for _ in 0..32 {
                    a.scq.ok();
                }
            }
        });
        assert_eq!(secret.bytes(), [0; 4096]);
        if rules().wrong_keys_end_uc {
            let ended = victim.guest.await_async(event::QP_ACCESS_ERR, b.qp.qpn, SOON);
            assert!(ended.is_ok(), "{ended:?}");
            assert_eq!(b.qp.state().expect("QP_QUERY"), qps::ERR);
        }
        victim.guest.disconnect();
    });
}

#[test]
fn keys_that_are_old_foreign_or_numbers_of_other_things_open_nothing() {
    case(|scene| {
        let victim = scene.world.node();
        let secret = victim.area_with(4096, access::ALL);
        let villain = scene.villain();
        let old = villain.area(64);
        villain.ctx.dereg(old.mr.lkey).expect("MR_DEREG");
        let other = scene.place.another(&villain, GuestConfig::default()).expect("a context");
        let foreign = other.mr(64);
        let own = villain.area(64);
        let qpn = villain.rc().qp.qpn;
        // As the local key of a write, and as the remote key of one to itself.
        for (what, key, addr) in [
            ("deregistered", old.mr.lkey, old.addr(0)),
            ("of another domain", foreign.lkey, foreign.addr(0)),
            ("of another guest", secret.rkey(), secret.addr(0)),
            ("a QPN", qpn, own.addr(0)),
            ("zero", 0, own.addr(0)),
            ("all ones", u32::MAX, own.addr(0)),
        ] {
            let mut end = villain.rc();
            end.qp.connect(end.address(), &hasty()).expect("to itself");
            let sge = virtual_guest::rings::Sge { addr, length: 8, lkey: key };
            let failed = end.run(&SendWr::write(1, &[sge], own.addr(0), own.rkey()));
            assert_eq!(failed.status, rules().local_protection, "{what}");
            let mut end = villain.rc();
            end.qp.connect(end.address(), &hasty()).expect("to itself");
            let failed = end.run(&SendWr::write(1, &[own.part(0, 8)], addr, key));
            assert!(rules().own_error(failed.status, status::REM_ACCESS_ERR), "{what}: {failed:?}");
        }
        assert_eq!(secret.bytes(), [0; 4096]);
        victim.guest.disconnect();
    });
}
