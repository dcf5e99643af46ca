//! The daemon: hung, killed, replaced, killed with a parent that keeps its sessions, under guests
//! that go on.
//!
//! Nothing tells a guest that its device's process is gone: the driver finds out by a keepalive
//! that is not answered. From then on everything fails at once, for programs that sleep and for
//! programs that only poll.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::drivers::LOAD;
use super::network::BACK;
use super::{Life, NICS, SHORT};

/// 2 s between keepalives and 5 s without an answer to one, and what an emulated guest on a busy
/// host adds.
const LOSS: Duration = Duration::from_secs(20);
/// Of a lost device, commands fail at once: within less than the 5 s that one may wait for its
/// answer. A guest may be slower than that by itself, but not each time.
const AT_ONCE: &str = "
n=0; s=124
while [ $s = 124 ] && [ $n -lt 5 ]; do
  timeout 3 ibv_devinfo -v > /tmp/devinfo 2>&1; s=$?; n=$((n+1))
done
cat /tmp/devinfo; [ $s != 0 ] && [ $s != 124 ]";

impl Life {
    pub(super) fn hang_daemon(&mut self) -> Result<()> {
        // In both guests: each driver asks in its own time, and both must have noticed.
        let a = self.hold(0, &["poll", "sleep", "busy"])?;
        let b = self.hold(1, &["poll"])?;
        self.fixture.daemon.hang(true)?;
        let start = Instant::now();
        let lost =
            self.must_flush(0, &a, start, LOSS).and_then(|()| self.must_flush(1, &b, start, LOSS));
        let at_once = lost.and_then(|()| self.guest(0)?.must(AT_ONCE, SHORT));
        self.fixture.daemon.hang(false)?;
        at_once?;
        // It answers what it was asked: somebody is there, and the drivers start their devices
        // again.
        self.must_come_back(Instant::now())?;
        self.reattach()?;
        NICS.iter().try_for_each(|nic| self.wait_empty(nic, true))
    }

    pub(super) fn kill_daemon(&mut self) -> Result<()> {
        let a = self.hold(0, &["poll", "sleep", "busy"])?;
        let b = self.hold(1, &["poll", "sleep"])?;
        let (client, server) = self.load()?;
        self.fixture.daemon.kill()?;
        let start = Instant::now();
        self.must_flush(0, &a, start, LOSS)?;
        self.must_flush(1, &b, start, LOSS)?;
        eprintln!(
            "    all work came back {:.1} s after the daemon's end",
            start.elapsed().as_secs_f64()
        );
        self.must_end(0, client)?;
        self.end(1, server)?;
        self.guest(0)?.must(AT_ONCE, SHORT)?;
        // Guest a lets its driver go, guest b's is there when its NIC is unplugged.
        self.remove_driver(0)?;
        self.guest(0)?.must("ping -q -c 1 -W 10 10.9.0.2", SHORT)?;
        self.fixture.daemon.replace()?;
        for n in 0..2 {
            let mut monitor = self.unplug_nic(n)?;
            self.plug_nic(n, &mut monitor)?;
        }
        self.guest(0)?.must(LOAD, SHORT)?;
        self.reattach()?;
        ensure!(
            self.fixture.daemon.nic(NICS[1])?.session == "driver_ready",
            "guest b is not served"
        );
        Ok(())
    }

    /// The supervisor dies, and its networks' processes with it. Its parent has its sessions, so
    /// the monitors notice nothing, and the drivers start their devices again.
    pub(super) fn kill_supervisor(&mut self) -> Result<()> {
        // A daemon that nobody keeps takes its sessions along: the NICs are plugged anew.
        self.fixture.daemon.kill()?;
        self.fixture.daemon.replace_by_kept()?;
        for n in 0..2 {
            let mut monitor = self.unplug_nic(n)?;
            self.plug_nic(n, &mut monitor)?;
        }
        self.reattach()?;
        let said = self.monitors_said()?;
        for _ in 0..2 {
            let (client, server) = self.load()?;
            let a = self.hold(0, &["poll", "sleep", "busy"])?;
            let b = self.hold(1, &["poll", "sleep"])?;
            let start = Instant::now();
            self.fixture.daemon.kill_supervisor()?;
            self.must_flush(0, &a, start, BACK)?;
            self.must_flush(1, &b, start, BACK)?;
            self.must_end(0, client)?;
            self.end(1, server)?;
            let back = self.must_come_back(start)?;
            eprintln!("    the devices were back {:.1} s after the kill", back.as_secs_f64());
            self.reattach()?;
            self.both_work()?;
            self.monitors_noticed_nothing_since(&said)?;
        }
        NICS.iter().try_for_each(|nic| self.wait_empty(nic, true))
    }
}
