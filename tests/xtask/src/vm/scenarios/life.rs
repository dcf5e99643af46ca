//! Ends and beginnings under load: programs killed, drivers unbound, guests reset and killed, each while data moves, and what is left after.
//!
//! After each step the daemon must hold nothing for what is gone, the other guest must still work, and a new start must work.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::fixture::Fixture;
use super::pair::{self, NICS};
use crate::cache::Cache;
use crate::exec;
use crate::rows::{self, Row};
use crate::vm::guest::{Guest, Job};
use crate::vm::peers::{self, Devices};

#[derive(Debug, Default, clap::Args)]
#[group(skip)]
pub(crate) struct Args {
    #[command(flatten)]
    pair: pair::Args,
}

const SHORT: Duration = Duration::from_secs(30);
/// ACK timeout of perftest's QPs: 4.096 us * 2^14 * 7 tries, times what an emulated guest on a busy host adds.
const GIVE_UP: Duration = Duration::from_secs(60);

struct Life {
    fixture: Fixture,
    devices: Devices,
}

type Step = (&'static str, fn(&mut Life) -> Result<()>);

const STEPS: &[Step] = &[
    ("driver removed and loaded, 3 times", Life::reload),
    ("program killed", Life::kill_program),
    ("driver unbound under load", Life::unbind),
    ("guest reset under load", Life::reset),
    ("VM killed under load", Life::kill_vm),
    ("network cable down and up", Life::link),
];

impl Args {
    pub(crate) fn run(&self, cache: &Cache) -> Result<bool> {
        let mut fixture = self.pair.start(cache)?;
        let (a, b) = fixture.lab.pair()?;
        let devices = peers::attach_ours(a, b)?;
        let mut life = Life { fixture, devices };
        let mut table = Vec::new();
        for (name, step) in STEPS
            .iter()
            .filter(|(n, _)| self.pair.only.as_ref().is_none_or(|o| n.contains(o.as_str())))
        {
            let start = Instant::now();
            // Traffic after each step, in both directions, is part of the step.
            let result = step(&mut life).and_then(|()| life.both_work());
            exec::check_interrupt()?;
            let seconds = start.elapsed().as_secs_f64();
            match &result {
                Ok(()) => eprintln!("    {name}: ok ({seconds:.1} s)"),
                Err(e) => eprintln!(
                    "    {name}: FAILED ({seconds:.1} s)\n{e:#}\nthe end of the daemon's log:\n{}",
                    life.fixture.daemon.log_tail(15)
                ),
            }
            if result.is_err() {
                life.recover()?;
            }
            table.push(Row {
                name: (*name).into(),
                ok: result.is_ok(),
                value: Some(seconds),
                reference: None,
                ratio: None,
                unit: "s".into(),
                target: String::new(),
            });
        }
        let clean = life.fixture.clean();
        rows::print_table(&table, "seconds", "-");
        if let Some(path) = &self.pair.json {
            rows::write_json(path, &table)?;
        }
        Ok(clean && table.iter().all(|r| r.ok))
    }
}

impl Life {
    /// A checked transfer from a to b.
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
        let (a, b) = self.fixture.lab.pair()?;
        let jobs = peers::endless(a, b, &self.devices)?;
        let before = self.fixture.daemon.counters(NICS[0])?;
        exec::wait_for("traffic to flow", SHORT, || {
            let now = self.fixture.daemon.counters(NICS[0])?;
            Ok((now.since(&before).bytes() > 1 << 20).then_some(()))
        })?;
        Ok(jobs)
    }

    /// Waits until a NIC holds nothing but what its driver made for itself at probe: the kernel's context, or nothing at all.
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

    fn reload(&mut self) -> Result<()> {
        for _ in 0..3 {
            for (n, nic) in NICS.iter().enumerate() {
                self.guest(n)?
                    .must("rmmod virtio_rdma && test -z \"$(ls /sys/class/infiniband)\"", SHORT)?;
                self.wait_empty(nic, false)?;
                self.guest(n)?.must("insmod /host/products/virtio_rdma.ko", SHORT)?;
            }
            self.reattach()?;
            self.both_work()?;
        }
        Ok(())
    }

    fn guest(&mut self, n: usize) -> Result<&mut Guest> {
        self.fixture.lab.guests.get_mut(n).context("no such guest")
    }

    fn kill_program(&mut self) -> Result<()> {
        let (client, server) = self.load()?;
        self.guest(0)?.kill(client)?;
        self.wait_empty(NICS[0], true)?;
        self.end(1, server)?;
        self.wait_empty(NICS[1], true)
    }

    /// A job whose peer is gone may wait for it for ever (perftest's servers do): it is killed then, which must work.
    fn end(&mut self, n: usize, job: Job) -> Result<()> {
        let guest = self.guest(n)?;
        guest.wait(job, Duration::from_secs(2)).map(|_| ())
    }

    fn unbind(&mut self) -> Result<()> {
        let (client, server) = self.load()?;
        let dev = "d=$(basename $(ls -d /sys/bus/virtio/drivers/virtio_rdma/virtio*))";
        let out = self.guest(0)?.must(
            &format!("{dev}; echo $d; echo $d > /sys/bus/virtio/drivers/virtio_rdma/unbind"),
            GIVE_UP,
        )?;
        let dev = out.trim().to_owned();
        self.must_end(0, client)?;
        self.wait_empty(NICS[0], false)?;
        self.end(1, server)?;
        self.guest(0)?
            .must(&format!("echo {dev} > /sys/bus/virtio/drivers/virtio_rdma/bind"), SHORT)?;
        self.reattach()
    }

    /// A program that lost its device or its peer must learn of it and end in error; it is neither stuck nor content.
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

    fn reset(&mut self) -> Result<()> {
        let (client, _) = self.load()?;
        self.guest(1)?.reset()?;
        self.must_end(0, client)?;
        // No virtio reset reaches a vhost-user backend, so what the old kernel had goes when the new one's driver says INIT.
        self.revive(1)?;
        self.reattach()?;
        self.wait_empty(NICS[1], true)
    }

    /// New guests in place of what a failed step left, so that the next one is judged by itself.
    fn recover(&mut self) -> Result<()> {
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

    fn kill_vm(&mut self) -> Result<()> {
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

    fn link(&mut self) -> Result<()> {
        self.guest(0)?
            .must("ip link set eth0 down; sleep 0.5; ibv_devinfo | grep -q PORT_DOWN", SHORT)?;
        self.guest(0)?.must(
            "ip link set eth0 up; ip addr replace 10.9.0.1/24 dev eth0; n=0; until ibv_devinfo | grep -q PORT_ACTIVE; do sleep 0.2; n=$((n+1)); [ $n -lt 50 ] || exit 1; done",
            SHORT,
        )?;
        self.reattach()
    }
}
