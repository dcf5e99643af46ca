//! The machine: asleep, reset, killed.
//!
//! A guest that sleeps has no 9p share: that file system cannot. So the script that puts it to
//! sleep lives in memory, takes the share away and brings it back; the serial port to the harness
//! is an emulated UART and sleeps well.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::{Life, NICS, SHORT};
use crate::exec;
use crate::vm::guest::Guest;
use crate::vm::qmp::Qmp;

/// Programs with work outstanding, detached, and when they have it: the nap.
const TO_BED: &str = r#"set -e
cp /host/products/vrdma-life /tmp/
rm -f /tmp/hold.* /host/nap.*
for m in poll sleep busy; do
  setsid sh -c "cd /tmp; ./vrdma-life {device} $m > /tmp/hold.$m 2>&1
    echo \$? > /tmp/hold.$m.status" < /dev/null > /dev/null 2>&1 &
done
n=0
until grep -q holding /tmp/hold.poll && grep -q holding /tmp/hold.sleep &&
  grep -q holding /tmp/hold.busy; do
  sleep 0.1; n=$((n+1)); [ $n -lt 200 ] || { cat /tmp/hold.*; exit 1; }
done
cat > /tmp/nap.sh <<'EOF'
exec > /tmp/nap.out 2>&1
cd /
n=0; until umount /host; do sleep 0.1; n=$((n+1)); [ $n -lt 100 ] || break; done
modprobe -r 9p 9pnet_virtio
{nap}
status=$?
modprobe -a 9pnet_virtio 9p
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 host /host
cp /tmp/nap.out /host/nap.out
echo $status > /host/nap.tmp
mv /host/nap.tmp /host/nap.status
EOF
setsid sh /tmp/nap.sh < /dev/null > /dev/null 2>&1 &
"#;

/// What became of the programs.
const AWAKE: &str = r"
for m in poll sleep busy; do
  n=0
  until [ -e /tmp/hold.$m.status ]; do sleep 0.1; n=$((n+1)); [ $n -lt 200 ] || break; done
  [ x$(cat /tmp/hold.$m.status) = x0 ] || { echo vrdma-life $m: $(cat /tmp/hold.$m.status);
    cat /tmp/hold.$m; dmesg | tail -30; exit 1; }
done
";

/// Asleep for two seconds, plus falling asleep and waking up under emulation.
const NAP: Duration = Duration::from_secs(90);

/// How a machine wakes up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wake {
    /// It sleeps no deeper than that it ends by itself.
    Alone,
    /// Somebody presses the power button until it is awake: nothing else in QEMU wakes a machine
    /// that is merely idle.
    Button,
    /// The monitor does, from a sleep in memory, of which it knows.
    Monitor,
}

impl Wake {
    fn wake(self, monitor: &mut Qmp) -> Result<()> {
        let mut tell = |command| monitor.execute(command, &json!({}));
        match self {
            Self::Alone => {}
            Self::Button => drop(tell("system_powerdown")?),
            Self::Monitor if tell("query-status")?["status"] == "suspended" => {
                tell("system_wakeup")?;
            }
            Self::Monitor => {}
        }
        Ok(())
    }
}

const PRESS: Duration = Duration::from_secs(2);

impl Life {
    pub(super) fn suspend_to_idle(&mut self) -> Result<()> {
        // A button that is pressed on the way to sleep ends the attempt.
        let nap =
            "modprobe button; for i in 1 2 3 4 5; do echo freeze > /sys/power/state && break; done";
        self.sleep(nap, Wake::Button)
    }

    pub(super) fn suspend_to_memory(&mut self) -> Result<()> {
        let nap = "echo deep > /sys/power/mem_sleep && echo mem > /sys/power/state";
        self.sleep(nap, Wake::Monitor)
    }

    /// All of a hibernation but the image and the power off: drivers freeze and thaw
    /// (Documentation/power/basic-pm-debugging.rst).
    pub(super) fn hibernate(&mut self) -> Result<()> {
        let nap = "echo platform > /sys/power/pm_test && echo disk > /sys/power/state";
        self.sleep(
            &format!("{nap}; s=$?; echo none > /sys/power/pm_test; ( exit $s )"),
            Wake::Alone,
        )
    }

    fn sleep(&mut self, nap: &str, wake: Wake) -> Result<()> {
        // In guest b: after a sleep in memory QEMU and Linux no longer agree about unplugging, and
        // guest a has yet to do that.
        let script = TO_BED.replace("{device}", &self.devices.options(1)).replace("{nap}", nap);
        let guest = self.guest(1)?;
        guest.must(&script, SHORT)?;
        await_morning(guest, wake).with_context(|| {
            let said = std::fs::read_to_string(guest.share().join("nap.out"));
            format!("{}\n{}", said.unwrap_or_default(), guest.console_tail(15))
        })?;
        guest.must(AWAKE, SHORT)?;
        self.reattach()?;
        self.wait_empty(NICS[1], true)
    }

    pub(super) fn reset(&mut self) -> Result<()> {
        let (client, _) = self.load()?;
        self.guest(1)?.reset()?;
        self.must_end(0, client)?;
        // No virtio reset reaches a vhost-user backend, so what the old kernel had goes when the
        // new one's driver says INIT.
        self.revive(1)?;
        self.reattach()?;
        self.wait_empty(NICS[1], true)
    }

    pub(super) fn kill_vm(&mut self) -> Result<()> {
        let (client, _) = self.load()?;
        self.fixture.lab.crash(1)?;
        exec::wait_for("the daemon to see that the VM is gone", SHORT, || {
            Ok((self.fixture.daemon.nic(NICS[1])?.session == "absent").then_some(()))
        })?;
        self.wait_empty(NICS[1], false)?;
        self.must_end(0, client)?;
        self.fixture.lab.replace(1)?;
        self.revive(1)?;
        self.reattach()
    }
}

fn await_morning(guest: &Guest, wake: Wake) -> Result<()> {
    let status = guest.share().join("nap.status");
    let mut monitor = guest.monitor()?;
    let mut pressed = Instant::now();
    let text = exec::wait_for("the guest to wake up", NAP, || {
        if pressed.elapsed() > PRESS {
            wake.wake(&mut monitor)?;
            pressed = Instant::now();
        }
        Ok(std::fs::read_to_string(&status).ok())
    })?;
    match text.trim() {
        "0" => Ok(()),
        other => bail!("the nap ended with status {other}"),
    }
}
