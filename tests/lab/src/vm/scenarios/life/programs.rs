//! Programs: killed, forked and replaced with work posted.

use std::time::Duration;

use anyhow::Result;

use super::{Life, NICS, SHORT};

/// Emulated, and with more QPs than a doorbell page has slots.
const STRESS: Duration = Duration::from_secs(120);

impl Life {
    pub(super) fn kill_program(&mut self) -> Result<()> {
        let holders = self.hold(0, &["poll", "sleep", "busy"])?;
        let (client, server) = self.load()?;
        for job in holders.iter().map(|h| h.job).chain([client]) {
            self.guest(0)?.kill(job)?;
        }
        self.wait_empty(NICS[0], true)?;
        self.end(1, server)?;
        self.wait_empty(NICS[1], true)
    }

    pub(super) fn fork(&mut self) -> Result<()> {
        let device = self.devices.options(0);
        self.guest(0)?.must(&format!("/host/products/vrdma-life {device} fork"), SHORT)?;
        self.wait_empty(NICS[0], true)
    }

    /// The program goes on as another one; its context must not.
    pub(super) fn exec(&mut self) -> Result<()> {
        let holders = self.hold(0, &["exec"])?;
        self.wait_empty(NICS[0], true)?;
        for holder in holders {
            let guest = self.guest(0)?;
            anyhow::ensure!(guest.finished(holder.job)?.is_none(), "{}", guest.output(holder.job));
            guest.kill(holder.job)?;
        }
        Ok(())
    }

    pub(super) fn stress(&mut self) -> Result<()> {
        self.stress_with("")
    }

    pub(super) fn stress_forked(&mut self) -> Result<()> {
        self.stress_with("-f")
    }

    fn stress_with(&mut self, option: &str) -> Result<()> {
        let device = self.devices.options(0);
        self.guest(0)?.must(&format!("/host/products/vrdma-stress {device} {option}"), STRESS)?;
        self.wait_empty(NICS[0], true)
    }
}
