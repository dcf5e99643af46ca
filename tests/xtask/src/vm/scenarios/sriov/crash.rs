//! kill -9 at every step of every operation.
//!
//! A step is a system call that changes something: a write (into sysfs, or the journal), a flush, a rename, a request to netlink. `strace` counts
//! those of an undisturbed run, and then one run after the other dies on entering the first, the second, …: the program under test
//! is the one that ships, and knows nothing of it. After each death `vf recover` must leave the state before or the state after.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Host, WAIT};

/// The calls that change something, in strace's names: sysfs and the journal are written, the journal is flushed and renamed.
const CALLS: &[&str] = &["write", "fsync", "rename"];
/// Settings go by netlink; what is only asked for by netlink is no step, but dying there does no harm either.
const WITH_NETLINK: &[&str] = &["write", "fsync", "rename", "sendto"];

struct Operation {
    calls: &'static [&'static str],
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
        let Self { calls: names, from, run } = self;
        host.sh(&format!("{from} >/dev/null"))?;
        let before = state(&host.list()?)?;
        let calls = names.join(",");
        let counts = host.guest()?.must(&format!("strace -f -qq -o /tmp/trace -e trace={calls} {run} >/dev/null; for c in {}; do grep -c \" $c(\" /tmp/trace; done; true", names.join(" ")), WAIT)?;
        let counts: Vec<u32> =
            counts.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let after = state(&host.list()?)?;
        ensure!(before != after, "the operation changes nothing: {run}");
        // The journal is written twice, each time to a new file that is flushed and renamed, and something happens between.
        ensure!(
            counts.len() == names.len() && counts.get(1) == Some(&4) && counts.get(2) == Some(&2),
            "unexpected calls {counts:?} of {names:?}"
        );
        let (mut points, mut completed, mut untouched) = (0, 0, 0);
        let mut reset = from.as_str();
        for (call, count) in names.iter().zip(&counts) {
            for n in 1..=*count {
                let script = format!(
                    "{reset} >/dev/null || exit 9
                    strace -f -qq -o /dev/null -e trace={call} -e inject={call}:signal=SIGKILL:when={n} {run} >/dev/null 2>/tmp/said
                    echo $? $(vhost-rdma --json vf recover | tr -d ' \\n')
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
                    "{run}, killed at {call} {n}, left {now}\nbefore {before}\nafter {after}\nrecovered {recovered}"
                );
                points += 1;
                reset = if now == before { ":" } else { from };
                completed += u32::from(now == after);
                untouched += u32::from(now == before);
            }
        }
        ensure!(
            completed > 0 && untouched > 0,
            "no kill hit the operation: {completed} after, {untouched} before"
        );
        eprintln!(
            "    killed at {points} points ({counts:?} of {names:?}): {untouched} as before, {completed} completed"
        );
        Ok(())
    }
}

fn operation(from: String, run: &str) -> Operation {
    Operation { calls: CALLS, from, run: format!("vhost-rdma vf {run}") }
}

pub(super) fn create(host: &mut Host) -> Result<()> {
    let pf = host.pf.clone();
    operation(format!("vhost-rdma vf create {pf} 0 --yes"), &format!("create {pf} 2")).run(host)
}

pub(super) fn set(host: &mut Host) -> Result<()> {
    let pf = host.pf.clone();
    host.vf(&format!("create {pf} 2 --yes"))?;
    let run = format!("set {pf}/1 --max-tx-rate 50 --vlan 9 --trust on --spoof-check off");
    let operation = operation(
        format!("vhost-rdma vf set {pf}/1 --max-tx-rate 0 --vlan 0 --trust off --spoof-check on"),
        &run,
    );
    Operation { calls: WITH_NETLINK, ..operation }.run(host)
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
    operation(format!("vhost-rdma vf create {pf} 2 --yes"), &format!("create {pf} 0 --yes"))
        .run(host)
}
