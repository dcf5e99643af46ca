//! Ends and beginnings under load: programs killed, drivers unbound, guests put to sleep, reset and
//! killed, NICs, netdevs and memory plugged and unplugged, the daemon stopped and killed, each
//! while there is work outstanding; and what is left after.
//!
//! After each step the daemon must hold nothing for what is gone, the other guest must still work,
//! and a new start must work. A program that loses its device must say so itself: `vrdma-life` (in
//! `tests/guest-programs`) ends well only if everything outstanding came back flushed and the event
//! came.

mod daemon;
mod drivers;
mod loss;
mod machine;
mod netdev;
mod network;
mod plug;
mod programs;
mod refusals;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::fixture::{Fixture, Options, Wish, kernel_is_clean};
use super::pair::NICS;
use crate::cache::Cache;
use crate::debug_kernel::Kernel;
use crate::exec;
use crate::part::Part;
use crate::rows::{self, Row};
use crate::vm::guest::{Guest, Job};
use crate::vm::peers::{self, Devices, Patience};

/// What it can be told
#[derive(Debug, Default, clap::Args)]
#[group(skip)]
pub struct Args {
    #[command(flatten)]
    /// What every scenario with guests can be told
    pub options: Options,
    /// Also the steps that CI has no time for
    #[arg(long)]
    pub full: bool,
    /// Of these steps each Nth, from the Kth on
    #[arg(long, value_name = "K/N", default_value_t)]
    pub part: Part,
    /// The kernel of the guests
    #[arg(long, value_enum, default_value_t)]
    pub kernel: Kernel,
}

const SHORT: Duration = Duration::from_secs(30);
/// ACK timeout of perftest's QPs: 4.096 us * 2^14 * 7 tries, times what an emulated guest on a busy
/// host adds.
const GIVE_UP: Duration = Duration::from_secs(60);

struct Life {
    fixture: Fixture,
    devices: Devices,
    /// What steps measured, beside their own rows.
    noted: Vec<Row>,
}

/// `vrdma-life` in one of its modes, in a guest.
#[derive(Debug, Clone, Copy)]
struct Holder {
    mode: &'static str,
    job: Job,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Always,
    Full,
    /// Where the kernel looks for faults.
    DebugKernel,
}
use When::{Always, DebugKernel, Full};

type Step = (&'static str, When, fn(&mut Life) -> Result<()>);

/// The step that wants two builds of the daemon.
const UPGRADE: &str = "network process replaced, daemon upgraded";

const STEPS: &[Step] = &[
    ("driver removed and loaded, 3 times", Always, Life::reload),
    ("driver removed under open contexts", Always, Life::remove_in_use),
    ("driver unbound under load", Always, Life::unbind),
    ("program killed", Always, Life::kill_program),
    ("fork with posted work", Always, Life::fork),
    ("exec with posted work", Always, Life::exec),
    ("lives of objects", Always, Life::stress),
    ("lives of objects, ibv_fork_init", Full, Life::stress_forked),
    ("memory refused", DebugKernel, Life::refuse_memory),
    ("interface down and up", Always, Life::interface),
    ("network cable out and in", Always, Life::cable),
    ("netdev renamed", Always, Life::rename),
    ("MAC address changed", Always, Life::change_mac),
    ("netdev unplugged and plugged", Always, Life::replug_netdev),
    ("suspended to idle", Always, Life::suspend_to_idle),
    ("suspended to memory", Always, Life::suspend_to_memory),
    ("hibernated, without the power off", Full, Life::hibernate),
    ("NIC unplugged and plugged", Always, Life::replug_nic),
    ("memory plugged and unplugged", Always, Life::plug_memory),
    ("guest reset under load", Always, Life::reset),
    ("VM killed under load", Always, Life::kill_vm),
    (UPGRADE, Always, Life::upgrade),
    ("network process killed", Always, Life::kill_network),
    ("network process killed, again and again", Always, Life::lose_again_and_again),
    ("daemon hangs while a lost device goes", Always, Life::hang_while_it_goes),
    ("daemon hangs", Always, Life::hang_daemon),
    ("daemon killed", Always, Life::kill_daemon),
    ("supervisor killed, its sessions kept", Always, Life::kill_supervisor),
];

impl Args {
    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let wanted = |(name, when, _): &&Step| match &self.options.only {
            Some(_) => self.options.chosen(name),
            None => match when {
                Always => true,
                Full => self.full,
                DebugKernel => self.kernel == Kernel::Debug,
            },
        };
        let steps: Vec<&Step> = STEPS.iter().filter(wanted).collect();
        anyhow::ensure!(
            !steps.is_empty(),
            "no step's name contains {:?}; see the names in the table of `cargo xtask vm life`",
            self.options.only.as_deref().unwrap_or_default()
        );
        let places = steps.iter().enumerate().filter(|(place, _)| self.part.has(*place));
        let steps: Vec<&Step> = places.map(|(_, step)| *step).collect();
        let upgrades = steps.iter().any(|(name, ..)| *name == UPGRADE);
        let wish = Wish { kernel: self.kernel, upgrades, ..self.options.wish(2) };
        let mut fixture = Fixture::start_as(cache, wish, plug::pluggable)?;
        let (a, b) = fixture.lab.pair()?;
        let devices = peers::attach_ours(a, b)?;
        let mut life = Life { fixture, devices, noted: Vec::new() };
        let mut table = Vec::new();
        for (name, _, step) in steps {
            table.push(life.row(name, *step)?);
            table.append(&mut life.noted);
        }
        let clean = life.fixture.clean();
        rows::print_table(&table, "seconds", "-");
        self.options.write(&table)?;
        Ok(clean && table.iter().all(|r| r.ok))
    }
}

impl Life {
    /// A step and what must hold after it.
    fn row(&mut self, name: &str, step: fn(&mut Self) -> Result<()>) -> Result<Row> {
        let start = Instant::now();
        let result = step(self).and_then(|()| self.both_work()).and_then(|()| self.complaints());
        exec::check_interrupt()?;
        let seconds = start.elapsed().as_secs_f64();
        match &result {
            Ok(()) => eprintln!("    {name}: ok ({seconds:.1} s)"),
            Err(e) => eprintln!(
                "    {name}: FAILED ({seconds:.1} s)\n{e:#}\nthe end of the daemon's log:\n{}",
                self.fixture.daemon.log_tail(15)
            ),
        }
        if result.is_err() {
            self.recover()?;
        }
        Ok(Row::timed(name, result.is_ok(), seconds))
    }

    /// A guest that is reset or killed takes its kernel's log along, so each step looks at it.
    fn complaints(&mut self) -> Result<()> {
        let guests = self.fixture.lab.guests.iter_mut();
        let complained: Vec<_> = guests
            .filter_map(|guest| (!kernel_is_clean(guest)).then(|| guest.name.clone()))
            .collect();
        anyhow::ensure!(complained.is_empty(), "the kernels of {complained:?} complained");
        Ok(())
    }

    /// A measured value with its reference, as a row of its own that holds up to a bound.
    fn note(&mut self, name: &str, (value, reference): (f64, f64), (most, unit): (f64, &str)) {
        self.noted.push(Row {
            name: name.into(),
            ok: value <= most,
            value: Some(value),
            reference: Some(reference),
            ratio: (reference > 0.0).then(|| value / reference),
            unit: unit.into(),
            target: if reference > 0.0 {
                format!("<={:.3}", most / reference)
            } else {
                String::new()
            },
        });
    }

    /// Checked transfers from a to b.
    fn both_work(&mut self) -> Result<()> {
        let (a, b) = self.fixture.lab.pair()?;
        for name in ["vrdma-check write", "vrdma-check send"] {
            let program = crate::vm::programs::PROGRAMS
                .iter()
                .find(|p| p.name == name)
                .context("no such program")?;
            if let Some(fault) = peers::run(a, b, &self.devices, program, 1, None)?.fault {
                bail!("{name} after it: {fault}");
            }
        }
        Ok(())
    }

    /// Endless traffic from a to b; both ends' jobs.
    fn load(&mut self) -> Result<(Job, Job)> {
        self.load_with(Patience::Short)
    }

    fn load_with(&mut self, patience: Patience) -> Result<(Job, Job)> {
        let (a, b) = self.fixture.lab.pair()?;
        let jobs = peers::endless(a, b, &self.devices, patience)?;
        self.must_flow()?;
        Ok(jobs)
    }

    /// Traffic of guest a goes on from here.
    fn must_flow(&self) -> Result<()> {
        let before = self.fixture.daemon.counters(NICS[0])?;
        exec::wait_for("traffic to flow", SHORT, || {
            let now = self.fixture.daemon.counters(NICS[0])?;
            Ok((now.since(&before).bytes() > 1 << 20).then_some(()))
        })
    }

    /// The same where this program's traffic is all there is, and waited for an interface or a
    /// peer: one that ended has lost its patience.
    fn must_go_on(&mut self, client: Job) -> Result<()> {
        let before = self.fixture.daemon.counters(NICS[0])?;
        exec::wait_for("traffic to go on", SHORT, || {
            if let Some(status) = self.guest(0)?.finished(client)? {
                let said = self.guest(0)?.output(client);
                bail!("the traffic's program ended with {status}:\n{said}");
            }
            let now = self.fixture.daemon.counters(NICS[0])?;
            Ok((now.since(&before).bytes() > 1 << 20).then_some(()))
        })
    }

    /// Programs with posted work in guest `n`, when they have it.
    fn hold(&mut self, n: usize, modes: &[&'static str]) -> Result<Vec<Holder>> {
        let device = self.devices.options(n);
        let guest = self.guest(n)?;
        let mut holders = Vec::new();
        for mode in modes {
            let line = format!("exec /host/products/vrdma-life {device} {mode}");
            holders.push(Holder { mode, job: guest.spawn(&line)? });
        }
        for holder in &holders {
            let what = format!("`vrdma-life {}` to post its work", holder.mode);
            exec::wait_for(&what, SHORT, || {
                if let Some(status) = guest.finished(holder.job)? {
                    bail!("it ended with {status}:\n{}", guest.output(holder.job));
                }
                Ok(guest.output(holder.job).contains("holding").then_some(()))
            })
            .with_context(|| guest.output(holder.job))?;
        }
        Ok(holders)
    }

    /// Each of them must have got everything back, flushed, before `bound` has passed since
    /// `start`.
    fn must_flush(
        &mut self,
        n: usize,
        holders: &[Holder],
        start: Instant,
        bound: Duration,
    ) -> Result<()> {
        let guest = self.guest(n)?;
        for holder in holders {
            let left = bound.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
            let out = guest.wait(holder.job, left)?;
            match out.status {
                Some(0) => {}
                Some(status) => {
                    bail!("`vrdma-life {}` ended with {status}:\n{}", holder.mode, out.text)
                }
                None => bail!(
                    "`vrdma-life {}` did not get its work back within {} s",
                    holder.mode,
                    bound.as_secs()
                ),
            }
        }
        Ok(())
    }

    /// Waits until a NIC holds nothing but what its driver made for itself at probe: the kernel's
    /// context, or nothing at all.
    fn wait_empty(&self, nic: &str, driver: bool) -> Result<()> {
        let mut last = None;
        let done = exec::wait_for(&format!("{nic} to hold nothing of programs"), SHORT, || {
            let view = self.fixture.daemon.nic(nic)?;
            if let Some(error) = view.error {
                bail!("{nic} is not served: {error}");
            }
            let o = view.objects;
            let most = u32::from(driver);
            let empty = o.contexts <= most
                && o.qps <= most
                && o.srqs == 0
                && o.cqs <= most
                && o.pds <= most
                && (driver || o.mrs == 0);
            last = Some(o);
            Ok(empty.then_some(()))
        });
        done.with_context(|| format!("{nic} holds {last:?}"))
    }

    fn reattach(&mut self) -> Result<()> {
        let (a, b) = self.fixture.lab.pair()?;
        self.devices = peers::find(a, b)?;
        Ok(())
    }

    fn guest(&mut self, n: usize) -> Result<&mut Guest> {
        self.fixture.lab.guests.get_mut(n).context("no such guest")
    }

    /// A job whose peer is gone may wait for it for ever (perftest's servers do): it is killed
    /// then, which must work.
    fn end(&mut self, n: usize, job: Job) -> Result<()> {
        let guest = self.guest(n)?;
        guest.wait(job, Duration::from_secs(2)).map(|_| ())
    }

    /// A program that lost its device or its peer must learn of it and end in error; it is neither
    /// stuck nor content.
    fn must_end(&mut self, n: usize, job: Job) -> Result<()> {
        let out = self.guest(n)?.wait(job, GIVE_UP)?;
        match out.status {
            None => bail!(
                "a program did not learn of its loss within {} s:\n{}",
                GIVE_UP.as_secs(),
                out.text
            ),
            Some(0) => bail!("a program ended as if nothing had happened:\n{}", out.text),
            Some(_) => Ok(()),
        }
    }

    /// New guests in place of what a failed step left, so that the next one is judged by itself.
    fn recover(&mut self) -> Result<()> {
        if self.fixture.daemon.check_alive().is_err() {
            self.fixture.daemon.replace()?;
        }
        for n in 0..2 {
            self.fixture.lab.replace(n)?;
        }
        self.revive(0)?;
        self.revive(1)?;
        self.reattach()
    }

    fn revive(&mut self, n: usize) -> Result<()> {
        self.fixture.lab.deliver(&self.fixture.products)?;
        peers::attach_ours_to(self.guest(n)?)?;
        Ok(())
    }
}
