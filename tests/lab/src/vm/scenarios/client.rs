//! A client in guest a, its server in guest b: how a third-party program is run and believed.
//!
//! Both ends must come to a good end in their time, and both NICs' counters must have grown by the
//! bytes that the client claims to have moved: data that took another way (TCP beside RDMA is never
//! far) is seen. What a client compares is its own affair, and said where it is listed. Nothing
//! here knows what a client is.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::fixture::{self, Fixture};
use crate::exec;
use crate::rows::Row;
use crate::vm::daemon::Counters;
use crate::vm::guest::{Guest, Job, Output};

const READY: Duration = Duration::from_secs(40);
const CLIENT: Duration = Duration::from_secs(300);
const SERVER_END: Duration = Duration::from_secs(20);
/// What a server whose client failed may still have to say.
const SERVER_AFTER_FAULT: Duration = Duration::from_secs(2);

/// When a server is of use.
#[derive(Debug, Clone, Copy)]
pub(super) enum Ready {
    /// It has written this.
    Says(&'static str),
    /// This script succeeds in its guest.
    When(&'static str),
}

/// The server waits for connections of the RDMA connection manager.
pub(super) const LISTENS: Ready = Ready::When("rdma resource show cm_id | grep -q LISTEN");

/// A client in guest a with its server in guest b.
///
/// A server without an end of its own waits for the file `/host/client.done`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Client {
    pub(super) name: &'static str,
    pub(super) server: &'static str,
    pub(super) ready: Ready,
    pub(super) client: &'static str,
    /// Payload bytes that must have gone through each NIC.
    pub(super) bytes: u64,
}

/// Runs a client to its end: its row, with the seconds that it took, and those of another device.
pub(super) fn drive(fixture: &mut Fixture, client: &Client, reference: Option<f64>) -> Result<Row> {
    let before = counters(fixture)?;
    let start = Instant::now();
    let mut fault = attempt(fixture, client)?;
    let seconds = start.elapsed().as_secs_f64();
    if fault.is_none() {
        fault = detour(&before, &counters(fixture)?, client.bytes);
    }
    eprintln!("    {}: {}", client.name, fault.as_deref().unwrap_or("ok"));
    Ok(Row {
        name: client.name.into(),
        ok: fault.is_none(),
        value: Some(seconds),
        reference,
        ratio: reference.map(|other| seconds / other),
        unit: "s".into(),
        target: String::new(),
    })
}

/// The seconds that a client takes in guests whose device is rxe; none if it comes to no good end
/// there, which is rxe's affair.
pub(super) fn seconds_on_rxe(fixture: &mut Fixture, client: &Client) -> Result<Option<f64>> {
    let start = Instant::now();
    let fault = attempt(fixture, client)?;
    let seconds = start.elapsed().as_secs_f64();
    eprintln!("    {} on rxe: {}", client.name, fault.as_deref().unwrap_or("ok"));
    Ok(fault.is_none().then_some(seconds))
}

/// What went wrong, if anything did.
fn attempt(fixture: &mut Fixture, client: &Client) -> Result<Option<String>> {
    let (a, b) = fixture.lab.pair()?;
    let job = b.spawn(&script(client.server))?;
    if !wait_ready(b, job, client.ready)? {
        let out = b.wait(job, Duration::from_secs(1))?;
        let fault = format!("its server is not ready: {:?}\n{}", out.status, out.text);
        return Ok(Some(fault));
    }
    let out = a.run(&script(client.client), CLIENT)?;
    // Tells servers without an end of their own.
    std::fs::write(b.share().join("client.done"), "")?;
    let end = b.wait(job, if out.ok() { SERVER_END } else { SERVER_AFTER_FAULT })?;
    std::fs::remove_file(b.share().join("client.done"))?;
    let Some(fault) = ends(&out, &end) else {
        eprint!("{}", figures(&out.text));
        return Ok(None);
    };
    let seen = [manager_saw("a", a)?, manager_saw("b", b)?].concat();
    Ok(Some(fault + &seen))
}

/// Has the kernel's connection manager note what it does from here on: a program that is refused a
/// connection does not say why.
const NOTE_CM: &str = "t=/sys/kernel/tracing
[ -d $t/events ] || mount -t tracefs tracefs $t
for part in rdma_cma ib_cma; do echo 1 > $t/events/$part/enable; done 2>/dev/null
: > $t/trace
";

fn script(text: &str) -> String {
    format!("{NOTE_CM}ulimit -l unlimited\nexport PATH=$PATH:/host/products\n{text}")
}

/// The last that a guest's connection manager did.
fn manager_saw(name: &str, guest: &mut Guest) -> Result<String> {
    let out = guest.run("grep -v '^#' /sys/kernel/tracing/trace | tail -n 40", READY)?;
    Ok(format!("\nguest {name}'s connection manager:\n{}", out.text))
}

fn counters(fixture: &Fixture) -> Result<[Counters; 2]> {
    let of = |n| fixture.daemon.counters(&fixture::nic(n));
    Ok([of(0)?, of(1)?])
}

fn ends(client: &Output, server: &Output) -> Option<String> {
    (!client.ok() || !server.ok()).then(|| {
        format!(
            "client {:?}, server {:?} (none: no end within its time)\n\
             client:\n{}\nserver:\n{}",
            client.status, server.status, client.text, server.text
        )
    })
}

/// The lines of fio with its rates.
fn figures(text: &str) -> String {
    let lines = text.lines().map(str::trim);
    let rates =
        lines.filter(|line| line.starts_with("READ: bw=") || line.starts_with("WRITE: bw="));
    rates.map(|line| format!("      {line}\n")).collect()
}

/// Payload that did not go through one of the NICs.
fn detour(before: &[Counters; 2], after: &[Counters; 2], bytes: u64) -> Option<String> {
    let moved = before.iter().zip(after).map(|(before, after)| after.since(before).bytes()).min();
    let least = moved.unwrap_or(0);
    (least < bytes).then(|| format!("only {least} of {bytes} bytes went through a NIC"))
}

fn wait_ready(b: &mut Guest, job: Job, ready: Ready) -> Result<bool> {
    let deadline = Instant::now() + READY;
    while Instant::now() < deadline {
        exec::check_interrupt()?;
        if b.finished(job)?.is_some() {
            return Ok(false);
        }
        let is_ready = match ready {
            Ready::Says(text) => b.output(job).contains(text),
            Ready::When(script) => b.run(script, READY)?.ok(),
        };
        if is_ready {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::{Counters, Output, detour, ends};

    fn end(status: Option<i32>) -> Output {
        Output { status, text: String::new() }
    }

    #[test]
    fn both_ends_must_come_to_a_good_end() {
        assert_eq!(ends(&end(Some(0)), &end(Some(0))), None);
        for (client, server) in [(Some(1), Some(0)), (Some(0), None), (None, Some(0))] {
            assert!(ends(&end(client), &end(server)).is_some());
        }
    }

    #[test]
    fn data_that_took_another_way_is_seen() {
        let none = Counters::default();
        let moved = Counters { tx_bytes: 600, rx_bytes: 400, ..none };
        assert_eq!(detour(&[none; 2], &[moved; 2], 1000), None);
        assert!(detour(&[none; 2], &[moved; 2], 1001).is_some());
        assert!(detour(&[none; 2], &[moved, none], 1).is_some());
        assert!(detour(&[moved; 2], &[moved; 2], 1).is_some());
    }
}
