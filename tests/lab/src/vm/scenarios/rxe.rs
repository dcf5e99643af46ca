//! The baseline alone: every program of the demo on rdma_rxe. It shows that a row that fails on our
//! device fails because of it.

use std::path::PathBuf;

use anyhow::Result;

use crate::cache::Cache;
use crate::roots::Debian;
use crate::rows::{self, Row};
use crate::vm::peers::{self, Ran};
use crate::vm::programs::PROGRAMS;
use crate::vm::{Lab, Nic, Plan};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Release of the guests
    #[arg(long, value_enum, default_value_t = Debian::Trixie)]
    debian: Debian,
    /// Only the programs whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
}

impl Args {
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let mut lab = Lab::prepare(cache)?;
        let plan =
            Plan { image: lab.image(self.debian)?, cpus: 1, nics: vec![Nic::None, Nic::None] };
        let programs = crate::products::programs(cache, self.debian)?;
        lab.boot(&plan)?;
        lab.deliver(&programs)?;
        let (a, b) = lab.pair()?;
        let devices = peers::attach_rxe(a, b)?;
        let mut table = Vec::new();
        for program in PROGRAMS
            .iter()
            .filter(|p| self.only.as_ref().is_none_or(|o| p.name.contains(o.as_str())))
        {
            let Ran { value, fault } =
                peers::run(a, b, &devices, program, program.reference_n, None)?;
            report(program.name, "rxe", value, program.unit, fault.as_deref());
            let row = Row::verdict(program.name, fault.is_none());
            table.push(Row { value, unit: program.unit.into(), ..row });
        }
        rows::print_table(&table, "rxe", "-");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(table.iter().all(|r| r.ok))
    }
}

/// One line as a program ends, and why it failed if it did.
pub(super) fn report(
    name: &str,
    device: &str,
    value: Option<f64>,
    unit: &str,
    fault: Option<&str>,
) {
    match (fault, value) {
        (Some(fault), _) => eprintln!("    {device:<5} {name}: FAILED\n{}", fault.trim_end()),
        (None, Some(v)) => eprintln!("    {device:<5} {name}: {v:.3} {unit}"),
        (None, None) => eprintln!("    {device:<5} {name}: ok"),
    }
}
