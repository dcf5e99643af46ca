//! A device that is lost, and the way back that its driver takes: later each time, and not at all
//! while nobody answers.
//!
//! Both are rules for the sake of others: a device whose process dies at once again is not to be
//! started without end, and a monitor may abort or stop a machine whose device is reset with nobody
//! behind it (docs/virtio-rdma.md, 5.6). QEMU does the latter: it waits for the answer of a process
//! that hangs, and its monitor with it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::drivers::LOAD;
use super::{Life, NICS, SHORT};
use crate::exec;

/// Deaths in a row; the last wait is 3.2 s.
const DEATHS: u32 = 6;
const FIRST: Duration = Duration::from_millis(100);

/// Later than the moment that the rule names: timers of a kernel, its work queues, two commands.
const SLACK: Duration = Duration::from_millis(1500);

/// The seconds of the kernel's clock at which the device of guest a was lost, spoke and was started
/// again, oldest first.
const TIMES: &str = "dmesg | sed -n 's/^\\[ *\\([0-9.]*\\)\\] .*the device \\(is \
                     lost\\|speaks\\|was started again\\).*/\\1 \\2/p'";

/// How often it was started again.
const STARTS: &str = "dmesg | grep -c 'the device was started again'";

/// The work item that takes the device down waits for a program. Its own functions end with that
/// call and have left the stack.
const STUCK: &str = "
n=0; until grep -qs ib_unregister_device /proc/[0-9]*/stack; do sleep 0.1; n=$((n+1)); \
    [ $n -lt 600 ] || { dmesg | tail -20; exit 1; }; done";

const LEFT_ALONE: &str = "
n=0; until dmesg | grep -q 'does not answer and is left alone'; do sleep 0.1; n=$((n+1)); \
    [ $n -lt 200 ] || { dmesg | tail -20; exit 1; }; done";

impl Life {
    /// A driver that counts from the beginning.
    fn fresh_driver(&mut self) -> Result<()> {
        self.remove_driver(0)?;
        self.guest(0)?.must(LOAD, SHORT)?;
        self.must_come_back(Instant::now()).map(|_| ())
    }

    pub(super) fn lose_again_and_again(&mut self) -> Result<()> {
        self.fresh_driver()?;
        let before = self.guest(0)?.must(TIMES, SHORT)?.lines().count();
        for _ in 0..DEATHS {
            // `grep -c` that finds nothing fails.
            let starts = self.guest(0)?.run(STARTS, SHORT)?.text.trim().parse::<u32>()?;
            self.fixture.daemon.kill_network("red")?;
            let again = format!(
                "n=0; until [ $({STARTS}) -gt {starts} ]; do sleep 0.1; n=$((n+1)); [ $n -lt 250 ] \
                 || {{ dmesg | tail -20; exit 1; }}; done"
            );
            self.guest(0)?.must(&again, SHORT)?;
            self.must_come_back(Instant::now())?;
        }
        let text = self.guest(0)?.must(TIMES, SHORT)?;
        let losses = losses(text.lines().skip(before))?;
        ensure!(losses.len() == DEATHS as usize, "{DEATHS} deaths, seen as {text}");
        let waits: Vec<Duration> = losses.iter().map(|loss| loss.started).collect();
        eprintln!("    from loss to the next start: {waits:?}");
        for (loss, least) in losses.iter().zip((0..).map(|n| FIRST * (1 << n))) {
            ensure!(loss.started >= least, "started before {least:?} were over: {losses:?}");
            // A process that died often is started later by its supervisor too, and says nothing
            // until then.
            let due = least.max(loss.spoke);
            let slack = exec::patient(SLACK);
            ensure!(loss.started <= due + slack, "started later than {due:?}: {losses:?}");
        }
        // Else a machine that is slow enough would wait as long without the rule.
        ensure!(waits.first() < waits.last(), "the waits do not grow: {waits:?}");
        self.reattach()
    }

    pub(super) fn hang_while_it_goes(&mut self) -> Result<()> {
        self.fresh_driver()?;
        self.reattach()?;
        // A registration under way, which the unregistration of the device waits for.
        let pinning = self.hold(0, &["pin"])?;
        self.fixture.daemon.kill_network("red")?;
        // The next process may be half a minute away: rows before this one killed it again and
        // again.
        self.guest(0)?.must(STUCK, SHORT * 4)?;
        // The device answered the first SHUTDOWN. Now nobody is there, and the program lets go.
        self.fixture.daemon.hang(true)?;
        let left = self.let_go_of_a_hung_device();
        self.fixture.daemon.hang(false)?;
        left?;
        // The late answer to the second SHUTDOWN: somebody is there.
        self.must_come_back(Instant::now())?;
        self.must_flush(0, &pinning, Instant::now(), SHORT)?;
        self.reattach()?;
        NICS.iter().try_for_each(|nic| self.wait_empty(nic, true))
    }

    fn let_go_of_a_hung_device(&mut self) -> Result<()> {
        self.guest(0)?.must("touch /tmp/let-go", SHORT)?;
        self.guest(0)?.must(LEFT_ALONE, SHORT)?;
        let status = self.guest(0)?.monitor()?.execute("query-status", &json!({}))?;
        ensure!(status["running"] == true, "the VM does not run: {status}");
        Ok(())
    }
}

/// From a loss on.
#[derive(Debug, Default, PartialEq)]
struct Loss {
    /// The device was heard for the first time.
    spoke: Duration,
    started: Duration,
}

/// The losses with a start behind them.
fn losses<'a>(lines: impl Iterator<Item = &'a str>) -> Result<Vec<Loss>> {
    let mut lost = None;
    let mut spoke = None;
    let mut found = Vec::new();
    for line in lines {
        let (time, what) = line.split_once(' ').context("a line without a time")?;
        let time = Duration::from_secs_f64(time.parse()?);
        match (what, lost) {
            ("is lost", _) => (lost, spoke) = (Some(time), None),
            ("speaks", Some(lost)) if spoke.is_none() => spoke = Some(time.saturating_sub(lost)),
            ("was started again", Some(begin)) => {
                let started = time.saturating_sub(begin);
                found.push(Loss { spoke: spoke.take().unwrap_or_default(), started });
                lost = None;
            }
            _ => {}
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_start_is_held_against_the_loss_before_it() {
        let text = "1.5 is lost\n1.5 speaks\n1.75 was started again\n2.0 is lost\n\
                    3.0 speaks\n3.5 speaks\n4.0 was started again";
        let [ms250, s1, s2] = [250, 1000, 2000].map(Duration::from_millis);
        let expected =
            [Loss { spoke: Duration::ZERO, started: ms250 }, Loss { spoke: s1, started: s2 }];
        assert_eq!(losses(text.lines()).unwrap(), expected);
    }
}
