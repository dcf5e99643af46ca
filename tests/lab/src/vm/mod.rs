//! The VM lab: guests under QEMU TCG on one host, our daemon beside them, and scripted steps in
//! them.

pub(crate) mod daemon;
pub(crate) mod guest;
pub(crate) mod nested;
pub(crate) mod peers;
pub(crate) mod programs;
pub(crate) mod qmp;
pub(crate) mod rundir;
pub mod scenarios;
pub(crate) mod suite;

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::exec;
use crate::host;
use crate::roots::{self, Debian, GuestImage};
use guest::{Guest, Spec};
use rundir::RunDir;

/// The parts of a lab in order of tear-down: guests die before the directory with their sockets
/// goes.
#[derive(Debug)]
pub(crate) struct Lab {
    pub(crate) guests: Vec<Guest>,
    pub(crate) run: RunDir,
    pub(crate) cache: Cache,
    /// A process in whose network namespace the monitors run, if not in this one.
    pub(crate) network_of: Option<u32>,
    qemu: PathBuf,
    specs: Vec<Spec>,
}

/// What to boot.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) image: GuestImage,
    pub(crate) cpus: u8,
    /// One entry per guest.
    pub(crate) nics: Vec<Nic>,
}

/// The RDMA NIC of a guest.
#[derive(Debug, Clone)]
pub(crate) enum Nic {
    None,
    /// Somebody's vhost-user backend.
    Socket(PathBuf),
    /// Options that our daemon printed.
    Options(Vec<String>),
    /// None, but guests of its own: see `nested`. Options for machine, memory and netdev, or none
    /// for the lab's.
    Host(Vec<String>),
    /// None, but this lab in it, which gets directories of this machine.
    Lab(Vec<PathBuf>),
}

/// Enough for every program of the lists.
pub(crate) const MEMORY_MIB: u32 = 1024;

/// Guests are called a, b, ….
pub(crate) const NAMES: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];

impl Lab {
    /// Everything that is needed before a guest can start.
    pub(crate) fn prepare(cache: &Cache) -> Result<Self> {
        host::require_root()?;
        host::ensure_tools(cache)?;
        if host::is_emulated() {
            exec::be_patient(nested::PATIENCE);
        }
        let qemu = roots::qemu(cache)?;
        Ok(Self {
            guests: Vec::new(),
            run: RunDir::new()?,
            cache: cache.clone(),
            network_of: None,
            qemu,
            specs: Vec::new(),
        })
    }

    pub(crate) fn image(&self, debian: Debian) -> Result<GuestImage> {
        roots::guest(&self.cache, debian)
    }

    /// Boots the guests `a`, `b`, … side by side.
    pub(crate) fn boot(&mut self, plan: &Plan) -> Result<()> {
        self.boot_with(plan, "")
    }

    /// The same with more words on the kernels' command lines.
    pub(crate) fn boot_with(&mut self, plan: &Plan, words: &str) -> Result<()> {
        let names = NAMES.get(..plan.nics.len()).context("too many guests")?;
        for (n, (name, nic)) in names.iter().zip(&plan.nics).enumerate() {
            let (vhost_socket, nic_args) = match nic {
                Nic::None | Nic::Lab(_) => (None, Vec::new()),
                Nic::Socket(path) => (Some(path.clone()), Vec::new()),
                Nic::Options(options) | Nic::Host(options) => (None, options.clone()),
            };
            let hosts = matches!(nic, Nic::Host(_));
            let directories = if let Nic::Lab(all) = nic { all.clone() } else { Vec::new() };
            let memory_mib = match nic {
                Nic::Host(_) => nested::HOST_MEMORY_MIB,
                Nic::Lab(_) => nested::LAB_MEMORY_MIB,
                Nic::None | Nic::Socket(_) | Nic::Options(_) => MEMORY_MIB,
            };
            let spec = Spec {
                name: (*name).to_owned(),
                number: u8::try_from(n + 1)?,
                cpus: if hosts { plan.cpus.max(nested::HOST_CPUS) } else { plan.cpus },
                memory_mib,
                hosts,
                directories,
                image: plan.image.clone(),
                vhost_socket,
                nic_args,
                words: if hosts {
                    format!("{words} {}", nested::HOST_WORDS)
                } else {
                    words.to_owned()
                },
                peer: names.get(n ^ 1).map(|p| (*p).to_owned()),
                network_of: self.network_of,
            };
            self.guests.push(Guest::start(&self.qemu, self.run.path(), &spec)?);
            self.specs.push(spec);
        }
        for guest in &mut self.guests {
            guest.wait_ready()?;
        }
        Ok(())
    }

    /// Ends all guests; others may be booted in their place.
    pub(crate) fn shut_down(&mut self) {
        self.guests.clear();
        self.specs.clear();
    }

    /// Kills guest `n` as a crash would, and returns when its QEMU is gone.
    pub(crate) fn crash(&mut self, n: usize) -> Result<()> {
        self.guests.get_mut(n).context("no such guest")?.crash();
        Ok(())
    }

    /// A new QEMU in the place of guest `n`, with the same NIC.
    pub(crate) fn replace(&mut self, n: usize) -> Result<()> {
        let spec = self.specs.get(n).context("no such guest")?;
        let slot = self.guests.get_mut(n).context("no such guest")?;
        slot.crash();
        *slot = Guest::start(&self.qemu, self.run.path(), spec)?;
        slot.wait_ready()
    }

    /// Puts files into every guest's `/host/products`.
    pub(crate) fn deliver(&self, files: &[PathBuf]) -> Result<()> {
        self.guests.iter().try_for_each(|guest| guest.deliver(files))
    }

    /// The two guests of a pair.
    pub(crate) fn pair(&mut self) -> Result<(&mut Guest, &mut Guest)> {
        match self.guests.as_mut_slice() {
            [a, b, ..] => Ok((a, b)),
            _ => anyhow::bail!("this needs two guests"),
        }
    }
}
