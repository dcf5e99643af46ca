//! How long traffic stands still while another process goes on with a network's NICs: after a
//! restart of the network, and after an upgrade of the whole daemon.
//!
//! The longest of the small writes that go one by one over one queue pair meanwhile, of a network
//! with many queue pairs beside one with a single pair. Both are restarted in turn; an upgrade
//! concerns both, and is done for each.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Effort;
use super::report::{Better, Row, Target};
use crate::daemon::DaemonOptions;
use crate::guest::GuestConfig;
use crate::qp::{Path, SendWr};
use crate::spec::status;
use crate::world::{Area, End, World};

/// Milliseconds.
const TARGET: Target = Target::Value(50.0);
/// Pairs after which a context gets another doorbell page; one has room for some more.
const PAGE_PAIRS: u32 = 200;
/// How long writes go on before and after.
const BESIDE: Duration = Duration::from_millis(20);

struct Network {
    name: &'static str,
    ends: Vec<(End, End)>,
    word: Area,
}

impl Network {
    fn new(world: &World, name: &'static str, pairs: u32) -> Self {
        let limits = ["--backing", "soft", "--max-qps", "16384"];
        let config = GuestConfig { ram_bytes: 256 << 20, ..GuestConfig::default() };
        let node = || world.node_with(name, &limits, config.clone());
        let (a, b) = (node(), node());
        let pair = |n| {
            if n % PAGE_PAIRS == PAGE_PAIRS - 1 {
                // Refused where there is room left.
                let _full = (a.ctx.add_doorbell_page(), b.ctx.add_doorbell_page());
            }
            let (near, far) = (a.rc(), b.rc());
            near.connect(&far, &Path::default());
            far.connect(&near, &Path::default());
            (near, far)
        };
        Self { name, ends: (0..pairs).map(pair).collect(), word: b.area(8) }
    }

    /// Milliseconds that the longest write took meanwhile.
    fn pause(&mut self, world: &World, how: How) -> f64 {
        let over = AtomicBool::new(false);
        let Some((near, _)) = self.ends.first_mut() else { return 0.0 };
        let write = SendWr::write(1, &[], self.word.addr(0), self.word.rkey()).inline(&[1; 8]);
        let longest = std::thread::scope(|scope| {
            let writes = scope.spawn(|| {
                let mut longest = Duration::ZERO;
                while !over.load(Ordering::Relaxed) {
                    let begin = Instant::now();
                    assert_eq!(near.run(&write).status, status::SUCCESS, "a write failed");
                    longest = longest.max(begin.elapsed());
                }
                longest
            });
            std::thread::sleep(BESIDE);
            match how {
                How::Restart => world.daemon.run(&["network", "restart", self.name]),
                How::Upgrade => world.daemon.run(&["upgrade"]),
            };
            std::thread::sleep(BESIDE);
            over.store(true, Ordering::Relaxed);
            writes.join().expect("every write succeeds")
        });
        longest.as_secs_f64() * 1e3
    }
}

/// What has another process go on.
#[derive(Debug, Clone, Copy)]
pub(super) enum How {
    /// `network restart`
    Restart,
    /// `upgrade`
    Upgrade,
}

/// `pairs` queue pairs beside one.
pub(super) fn pause(name: &str, how: How, pairs: u32, effort: Effort) -> Row {
    let installed = matches!(how, How::Upgrade);
    let options = DaemonOptions { processes: true, installed, ..DaemonOptions::default() };
    let world = World::with(&options, Duration::from_secs(600));
    world.daemon.add_network("few", 101);
    let (mut many, mut few) = (Network::new(&world, "net", pairs), Network::new(&world, "few", 1));
    let samples: Vec<_> =
        (0..effort.samples).map(|_| (many.pause(&world, how), few.pause(&world, how))).collect();
    Row::best(name, "ms", Better::Less, Some(TARGET), &samples)
}
