//! Pods whose guest's memory is huge pages of the node (`hugepages-2Mi`), as VMs that want speed
//! have it.
//!
//! Huge pages belong to the machine and not to the node's namespaces: the step takes as many as its
//! pods need and gives them back however it ends. A kubelet counts them when it starts, so it is
//! started again, before and after.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::exec::wait_for;
use crate::k8s::pods::Wanted;
use crate::k8s::test::{Bench, POOL};

const POOL_OF_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
/// Pages of two pods' guests.
const PAGES: u64 = 16;
const WAIT: Duration = Duration::from_secs(120);

fn count(what: &str) -> Result<u64> {
    let path = format!("{POOL_OF_PAGES}/{what}");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    text.trim().parse().with_context(|| path)
}

/// Huge pages of the machine that are ours for a while.
struct Taken {
    before: u64,
}

impl Taken {
    fn new() -> Result<Self> {
        let taken = Self { before: count("nr_hugepages")? };
        fs::write(format!("{POOL_OF_PAGES}/nr_hugepages"), (taken.before + PAGES).to_string())?;
        let now = count("nr_hugepages")?;
        ensure!(now == taken.before + PAGES, "the kernel makes only {now} huge pages");
        Ok(taken)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Err(e) = fs::write(format!("{POOL_OF_PAGES}/nr_hugepages"), self.before.to_string())
        {
            eprintln!("    the machine keeps {PAGES} huge pages too many: {e}");
        }
    }
}

impl Bench<'_> {
    fn on_huge_pages(&self) -> Result<()> {
        wait_for("huge pages to be allocatable", WAIT, || {
            let offered = self.pods.kubectl.allocatable("hugepages-2Mi")?;
            std::thread::sleep(Duration::from_millis(200));
            Ok(offered.is_some_and(|amount| amount != "0").then_some(()))
        })?;
        let free = count("free_hugepages")?;
        let start = |name| {
            let wanted = Wanted { args: &["--huge-pages"], huge: true, ..Wanted::new(name, POOL) };
            self.pods.start(&wanted)
        };
        let pods = [start("huge-a")?, start("huge-b")?];
        let [a, b] = &pods;
        self.counted(a, b)?;
        self.counted(b, a)?;
        let left = count("free_hugepages")?;
        ensure!(left < free, "the guests' memory is in no huge page: {free} free, then {left}");
        self.pods.kubectl.delete_pods(&["huge-a", "huge-b"])?;
        self.consistent(&[])
    }
}

pub(crate) fn pods(bench: &mut Bench<'_>) -> Result<()> {
    let result = {
        let _taken = Taken::new()?;
        bench.restart_kubelet("TERM").and_then(|()| bench.on_huge_pages())
    };
    bench.tidy();
    bench.restart_kubelet("TERM")?;
    result
}
