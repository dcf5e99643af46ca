//! Two VMs on one daemon: the demo. First rxe on the guests' netdevs, then, with rxe gone, our
//! device, in the same boot.

use anyhow::Result;
use serde::Serialize;

use super::figures::{self, Cost, FigureRow};
use super::fixture::{Fixture, Options};
use super::rxe::report;
use crate::cache::Cache;
use crate::rows::{self, Row};
use crate::vm::daemon::Daemon;
use crate::vm::guest::Guest;
use crate::vm::peers::{self, Ran, Witness};
use crate::vm::programs::{CONTENDED, PROGRAMS, Program};

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    #[command(flatten)]
    /// What every scenario with guests can be told
    pub options: Options,
    /// Leave the rxe half out; the rows have no reference then
    #[arg(long)]
    pub no_reference: bool,
    /// Also the README's five figures: beside TCP, and what a message costs in processor time
    #[arg(long)]
    pub figures: bool,
}

/// A line of the `--json` file.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Line {
    Program(Row),
    Figure(FigureRow),
}

impl Line {
    fn row(&self) -> &Row {
        match self {
            Self::Program(row) => row,
            Self::Figure(figure) => &figure.row,
        }
    }
}

/// What is measured of the README's figures, one list for each way.
#[derive(Debug, Default)]
struct Figures {
    ours: Vec<Cost>,
    rxe: Vec<Cost>,
    tcp: Vec<Cost>,
}

/// The names of all rows.
pub fn names() -> impl Iterator<Item = &'static str> {
    PROGRAMS.iter().map(|program| program.name)
}

/// NICs of guests a and b, as the fixture names them.
pub(super) const NICS: [&str; 2] = ["vm0", "vm1"];

impl Args {
    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        anyhow::ensure!(
            self.chosen().next().is_some(),
            "no program's name contains {:?}; see the names in the table of `cargo xtask demo`",
            self.options.only.as_deref().unwrap_or_default()
        );
        let mut fixture = self.start(cache)?;
        let (a, b) = fixture.lab.pair()?;
        let table = self.compare(a, b, &fixture.daemon);
        let clean = fixture.clean();
        let table = table.inspect_err(|_| {
            eprintln!("the end of the daemon's log:\n{}", fixture.daemon.log_tail(25));
        })?;
        let rows: Vec<Row> = table.iter().map(|line| line.row().clone()).collect();
        rows::print_table(&rows, "vhost-rdma", "rxe");
        let figures = table.iter().filter_map(|line| match line {
            Line::Figure(figure) => Some(figure.clone()),
            Line::Program(_) => None,
        });
        let figures: Vec<FigureRow> = figures.collect();
        if !figures.is_empty() {
            figures::print(&figures);
        }
        self.options.write(&table)?;
        Ok(clean && rows.iter().all(|r| r.ok))
    }

    /// The same with the README's figures: the demo.
    #[must_use]
    pub fn with_figures(&self) -> Self {
        Self { options: self.options.clone(), figures: self.options.only.is_none(), ..*self }
    }

    /// The daemon and two guests on it.
    pub(super) fn start(&self, cache: &Cache) -> Result<Fixture> {
        Fixture::start(cache, self.options.wish(2))
    }

    fn chosen(&self) -> impl Iterator<Item = &'static Program> + '_ {
        let contended = if self.options.cpus > 1 { CONTENDED } else { &[] };
        let wanted = |program: &&'static Program| self.options.chosen(program.name);
        self.of_both().chain(contended.iter().filter(wanted))
    }

    /// Those that rxe runs as well, before all others. Its atomics are atomic towards its own QPs
    /// alone: it says IBV_ATOMIC_HCA (rxe_param.h).
    fn of_both(&self) -> impl Iterator<Item = &'static Program> + '_ {
        PROGRAMS.iter().filter(|program| self.options.chosen(program.name))
    }

    fn compare(&self, a: &mut Guest, b: &mut Guest, daemon: &Daemon) -> Result<Vec<Line>> {
        let qemus: Vec<u32> = [&*a, &*b].into_iter().filter_map(Guest::process).collect();
        let payers = || Ok([qemus.clone(), daemon.processes()?].concat());
        let mut figures = Figures::default();
        let mut reference = Vec::new();
        if !self.no_reference {
            let devices = peers::attach_rxe(a, b)?;
            for program in self.of_both() {
                let ran = peers::run(a, b, &devices, program, program.reference_n, None)?;
                report(program.name, "rxe", ran.value, program.unit, ran.fault.as_deref());
                reference.push(ran);
            }
            if self.figures {
                eprintln!("    rxe:");
                figures.rxe = figures::on_rdma((a, b), &devices, &payers)?;
            }
            peers::detach_rxe(a, b)?;
        }
        let devices = peers::attach_ours(a, b)?;
        let witness = Witness { daemon, client: NICS[0], server: NICS[1] };
        let mut table = Vec::new();
        for (n, program) in self.chosen().enumerate() {
            let ours = peers::run(a, b, &devices, program, program.n, Some(witness))?;
            report(program.name, "ours", ours.value, program.unit, ours.fault.as_deref());
            table.push(Line::Program(row(program, &ours, reference.get(n))));
        }
        if self.figures {
            eprintln!("    ours:");
            figures.ours = figures::on_rdma((a, b), &devices, &payers)?;
            eprintln!("    TCP:");
            figures.tcp = figures::on_tcp((a, b), &devices, &payers)?;
            let rows = figures::table(&figures.ours, &figures.rxe, &figures.tcp);
            table.extend(rows.into_iter().map(Line::Figure));
        }
        Ok(table)
    }
}

fn row(program: &Program, ours: &Ran, reference: Option<&Ran>) -> Row {
    let other = reference.and_then(|r| r.value);
    let ratio = match (ours.value, other) {
        (Some(v), Some(r)) if r > 0.0 => Some(v / r),
        _ => None,
    };
    Row {
        name: program.name.into(),
        // "Every line ran" means both columns: a missing reference is a hole in the table.
        ok: ours.fault.is_none() && reference.is_none_or(|r| r.fault.is_none()),
        value: ours.value,
        reference: other,
        ratio,
        unit: program.unit.into(),
        target: program.target.into(),
    }
}
