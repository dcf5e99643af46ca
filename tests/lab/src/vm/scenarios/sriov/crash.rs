//! kill -9 at every step of every operation.
//!
//! A step is a system call that changes something: a write (into sysfs, or the journal), a flush, a
//! rename, a request to netlink. `strace` counts those of an undisturbed run, and then one run
//! after the other dies on entering the first, the second, …: the program under test is the one
//! that ships, and knows nothing of it. After each death `vf recover` must leave the state before
//! or the state after.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Host, WAIT};

/// The calls that change something, in strace's names: sysfs and the journal are written, the
/// journal is flushed and renamed, settings go by netlink.
const CALLS: [&str; 4] = ["write", "fsync", "rename", "sendto"];

struct Operation {
    /// Makes the state from which it starts.
    from: String,
    /// The command that dies.
    run: String,
}

/// Every VF in the words that must not differ; a new MAC address is drawn each time VFs are made.
fn state(list: &Value) -> Result<String> {
    let vfs = list.get("vfs").and_then(Value::as_array).context("no VFs")?;
    let one = |vf: &Value| {
        let part = |path: &str| vf.pointer(path).cloned().unwrap_or(Value::Null);
        [
            "/index",
            "/driver",
            "/driver_override",
            "/settings/max_tx_rate",
            "/settings/vlan",
            "/settings/spoof_check",
            "/settings/trust",
        ]
        .map(part)
    };
    ensure!(list.get("interrupted") == Some(&Value::Null), "still interrupted: {list}");
    Ok(format!("{:?}", vfs.iter().map(one).collect::<Vec<_>>()))
}

impl Operation {
    fn run(&self, host: &mut Host) -> Result<()> {
        let Self { from, run } = self;
        host.sh(&format!("{from} >/dev/null"))?;
        let before = state(&host.list()?)?;
        let trace = host.guest()?.must(
            &format!(
                "strace -f -qq -o /tmp/trace -e trace={} {run} >/dev/null && cat /tmp/trace",
                CALLS.join(",")
            ),
            WAIT,
        )?;
        let steps = steps(&trace)?;
        let after = state(&host.list()?)?;
        ensure!(before != after, "the operation changes nothing: {run}");
        let (mut completed, mut untouched) = (0, 0);
        let mut reset = from.as_str();
        for (call, n) in &steps {
            let script = format!(
                "{reset} >/dev/null || exit 9
                strace -f -qq -o /dev/null -e trace={call} -e \
                    inject={call}:signal=SIGKILL:when={n} {run} >/dev/null 2>/tmp/said
                echo $? $(vhost-rdma --json vf recover | tr -d ' \n')
                vhost-rdma --json vf list {}",
                host.pf
            );
            let said = host.guest()?.must(&script, WAIT)?;
            let (first, list) = said.split_once('\n').context("no output")?;
            let (status, recovered) = first.split_once(' ').unwrap_or((first, ""));
            ensure!(status == "137", "{run} was not killed at {call} {n}: status {status}");
            let recovered: Value = serde_json::from_str(recovered)
                .with_context(|| format!("vf recover after {call} {n}: {recovered}"))?;
            let list: Value = serde_json::from_str(list)
                .with_context(|| format!("vf list after {call} {n}: {list}"))?;
            let now = state(list.get(0).context("no physical function")?)?;
            ensure!(
                now == before || now == after,
                "{run}, killed at {call} {n}, left {now}\nbefore {before}\nafter {after}\n\
                 recovered {recovered}"
            );
            reset = if now == before { ":" } else { from };
            completed += u32::from(now == after);
            untouched += u32::from(now == before);
        }
        ensure!(
            completed > 0 && untouched > 0,
            "no kill hit the operation: {completed} after, {untouched} before"
        );
        eprintln!(
            "    killed at {} points: {untouched} as before, {completed} completed",
            steps.len()
        );
        Ok(())
    }
}

/// The calls of a run as (name, how many of that name so far), from the first that writes the
/// journal to the last that does. What is only asked before and after is left out, and the last
/// words on standard output stay in: dying there, the operation is done.
fn steps(trace: &str) -> Result<Vec<(&'static str, u32)>> {
    let mut seen = [0; CALLS.len()];
    let mut all = Vec::new();
    for line in trace.lines() {
        let found =
            CALLS.iter().zip(&mut seen).find(|(call, _)| line.contains(&format!(" {call}(")));
        if let Some((call, count)) = found {
            *count += 1;
            all.push((*call, *count));
        }
    }
    let at = |wanted: &str| all.iter().position(|(call, _)| *call == wanted);
    let first = at("write").context("nothing was written")?;
    let last =
        all.iter().rposition(|(call, _)| *call == "rename").context("nothing was renamed")?;
    // The journal is written twice, each time to a new file that is flushed and renamed, and the
    // directory is flushed.
    let [_, fsyncs, renames, _] = seen;
    ensure!((fsyncs, renames) == (4, 2), "the journal was not written twice: {all:?}");
    Ok(all
        .into_iter()
        .enumerate()
        .filter(|(n, (call, _))| (first..=last).contains(n) || *call != "sendto")
        .map(|(_, step)| step)
        .collect())
}

fn operation(from: String, run: &str) -> Operation {
    Operation { from, run: format!("vhost-rdma vf {run}") }
}

pub(super) fn create(host: &mut Host) -> Result<()> {
    let pf = host.pf.clone();
    operation(format!("vhost-rdma vf create {pf} 0 --yes"), &format!("create {pf} 2")).run(host)
}

pub(super) fn set(host: &mut Host) -> Result<()> {
    let pf = host.pf.clone();
    host.vf(&format!("create {pf} 2 --yes"))?;
    let run = &format!("set {pf}/1 --max-tx-rate 50 --vlan 9 --trust on --spoof-check off");
    operation(
        format!("vhost-rdma vf set {pf}/1 --max-tx-rate 0 --vlan 0 --trust off --spoof-check on"),
        run,
    )
    .run(host)
}

pub(super) fn bind(host: &mut Host) -> Result<()> {
    let pf = host.pf.clone();
    host.vf(&format!("create {pf} 2 --yes"))?;
    operation(format!("vhost-rdma vf unbind {pf}/0"), &format!("bind {pf}/0")).run(host)
}

pub(super) fn unbind(host: &mut Host) -> Result<()> {
    let pf = host.pf.clone();
    host.vf(&format!("create {pf} 2 --yes"))?;
    operation(format!("vhost-rdma vf bind {pf}/0"), &format!("unbind {pf}/0")).run(host)
}

pub(super) fn remove(host: &mut Host) -> Result<()> {
    let pf = host.pf.clone();
    // What an earlier step has set would not come back with new functions.
    host.vf(&format!("create {pf} 0 --yes"))?;
    operation(format!("vhost-rdma vf create {pf} 2 --yes"), &format!("create {pf} 0 --yes"))
        .run(host)
}
