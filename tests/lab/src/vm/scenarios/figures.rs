//! The README's five figures: what a message costs over our device, over rxe and over TCP, in the
//! same two guests.
//!
//! perftest runs for some seconds, and in the middle of that time, when nobody sets up anything
//! any more, the processor time of the two machines and of the daemon is taken. Divided by the
//! messages of that time it is the last column: what the host pays for one, guests included. TCP
//! is qperf over the same guests' virtio-net, which QEMU carries from one to the other itself; a
//! host with vhost-net would be faster, rxe over it as well.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::exec;
use crate::rows::Row;
use crate::vm::guest::{Guest, Job};
use crate::vm::peers::{self, Devices};

/// How long a program runs; the window lies within, behind its start in an emulated machine.
const RUN: u32 = 8;
const BEFORE: Duration = Duration::from_millis(3500);
const WINDOW: Duration = Duration::from_secs(3);
const END: Duration = Duration::from_secs(60);
const PERFTEST_PORT: u16 = 18515;
const QPERF_PORT: u16 = 19765;
/// Ticks of /proc/PID/stat, `USER_HZ`.
const TICKS: f64 = 100.0;

/// How a figure follows from what a program prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Microseconds, one way.
    Latency,
    /// Millions of messages in a second.
    Rate,
    /// Gigabits in a second.
    Bandwidth,
}

impl Kind {
    fn unit(self) -> &'static str {
        match self {
            Self::Latency => "us",
            Self::Rate => "M/s",
            Self::Bandwidth => "Gb/s",
        }
    }

    /// The figure in perftest's last line, `-D` given: it has other columns for latencies then.
    fn of_perftest(self, text: &str) -> Option<f64> {
        let column = match self {
            Self::Latency => 2,
            Self::Rate => 4,
            Self::Bandwidth => 3,
        };
        text.lines().rev().find_map(|line| {
            let words: Vec<f64> = line.split_whitespace().map_while(|w| w.parse().ok()).collect();
            (words.len() > 3).then(|| words.get(column).copied())?
        })
    }

    /// The figure in what qperf prints, for messages of `size` bytes.
    fn of_qperf(self, text: &str, size: f64) -> Option<f64> {
        let (_, value) = text.lines().find_map(|line| line.split_once('='))?;
        let mut words = value.split_whitespace();
        let value: f64 = words.next()?.replace(',', "").parse().ok()?;
        let scale = match words.next()? {
            "ns" => 1e-9,
            "us" => 1e-6,
            "ms" => 1e-3,
            "sec" => 1.0,
            "bytes/sec" => 1.0,
            "KB/sec" => 1e3,
            "MB/sec" => 1e6,
            "GB/sec" => 1e9,
            _ => return None,
        };
        let value = value * scale;
        Some(match self {
            Self::Latency => value * 1e6,
            Self::Rate => value / size / 1e6,
            Self::Bandwidth => value * 8.0 / 1e9,
        })
    }

    /// Messages in a second.
    fn messages(self, figure: f64, size: f64) -> f64 {
        match self {
            Self::Latency => 1e6 / figure,
            Self::Rate => figure * 1e6,
            Self::Bandwidth => figure * 1e9 / 8.0 / size,
        }
    }
}

/// One row: perftest's words and qperf's for the same work.
#[derive(Debug)]
struct Figure {
    name: &'static str,
    perftest: &'static str,
    qperf: &'static str,
    kind: Kind,
    size: u32,
}

const fn figure(
    name: &'static str,
    (perftest, qperf): (&'static str, &'static str),
    kind: Kind,
    size: u32,
) -> Figure {
    Figure { name, perftest, qperf, kind, size }
}

const FIGURES: [Figure; 5] = [
    figure("64 B message, polled", ("ib_send_lat", "tcp_lat"), Kind::Latency, 64),
    figure("64 B read, polled", ("ib_read_lat", "tcp_lat"), Kind::Latency, 64),
    figure("64 B messages, many", ("ib_send_bw", "tcp_bw"), Kind::Rate, 64),
    figure("64 KiB writes", ("ib_write_bw", "tcp_bw"), Kind::Bandwidth, 64 * 1024),
    figure("64 KiB reads", ("ib_read_bw", "tcp_bw"), Kind::Bandwidth, 64 * 1024),
];

/// A figure, and the processor time of one message in microseconds.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Cost {
    /// In the row's unit.
    pub value: f64,
    /// Of both guests' monitors and the daemon together.
    pub cpu_us: f64,
}

/// One row of the README's figures.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FigureRow {
    /// The figure on our device, held against rxe's.
    #[serde(flatten)]
    pub row: Row,
    /// What a message costs on our device, in microseconds of processor time.
    pub cpu_us: Option<f64>,
    /// On rxe.
    pub rxe: Option<Cost>,
    /// By TCP.
    pub tcp: Option<Cost>,
}

/// Who spends processor time: the daemon's processes and both machines.
pub(super) type Payers<'a> = &'a dyn Fn() -> Result<Vec<u32>>;

/// The figures on the RDMA devices that the guests have now.
pub(super) fn on_rdma(
    (a, b): (&mut Guest, &mut Guest),
    devices: &Devices,
    payers: Payers<'_>,
) -> Result<Vec<Cost>> {
    let one = |figure: &Figure| {
        let size = figure.size;
        let line = format!(
            "{} -d {{dev}} -x {{gid}} -s {size} -F -D {RUN} --report_gbits",
            figure.perftest
        );
        let server = peers::start_server(b, devices.of(1), (&line, PERFTEST_PORT), 0)?;
        let client = peers::command(&format!("{line} {{peer}}"), devices.of(0), 0);
        let (text, cores) = measured((a, &client), (b, server), payers)?;
        let value = figure.kind.of_perftest(&text);
        let value = value.with_context(|| format!("{}: no figure in\n{text}", figure.name))?;
        Ok(cost(figure, value, cores))
    };
    FIGURES.iter().map(one).collect()
}

/// The same by TCP.
pub(super) fn on_tcp(
    (a, b): (&mut Guest, &mut Guest),
    devices: &Devices,
    payers: Payers<'_>,
) -> Result<Vec<Cost>> {
    let one = |figure: &Figure| {
        let server = peers::start_server(b, devices.of(1), ("qperf", QPERF_PORT), 0)?;
        // The server has no end of its own; the client tells it to quit.
        let client = format!(
            "qperf 10.9.0.2 -t {RUN} -m {} {} || exit\nqperf 10.9.0.2 quit\n",
            figure.size, figure.qperf
        );
        let (text, cores) = measured((a, &client), (b, server), payers)?;
        let value = figure.kind.of_qperf(&text, f64::from(figure.size));
        let value = value.with_context(|| format!("{}: no figure in\n{text}", figure.name))?;
        Ok(cost(figure, value, cores))
    };
    FIGURES.iter().map(one).collect()
}

fn cost(figure: &Figure, value: f64, cores: f64) -> Cost {
    let messages = figure.kind.messages(value, f64::from(figure.size));
    let cost = Cost { value, cpu_us: cores * 1e6 / messages };
    eprintln!(
        "    {}: {:.3} {}, {:.3} us of processor time",
        figure.name,
        cost.value,
        figure.kind.unit(),
        cost.cpu_us
    );
    cost
}

/// Runs a client to its end beside its server; what it printed, and how many processors were busy
/// in the window.
fn measured(
    (a, client): (&mut Guest, &str),
    (b, server): (&mut Guest, Job),
    payers: Payers<'_>,
) -> Result<(String, f64)> {
    let job = a.spawn(client)?;
    sleep(BEFORE)?;
    let pids = payers()?;
    let (from, before) = (Instant::now(), ticks(&pids)?);
    sleep(WINDOW)?;
    ensure!(a.finished(job)?.is_none(), "the client ended too early:\n{}", a.output(job));
    let (took, after) = (from.elapsed(), ticks(&pids)?);
    let out = a.wait(job, END)?;
    let end = b.wait(server, END)?;
    ensure!(
        out.ok() && end.ok(),
        "client {:?}, server {:?}\nclient:\n{}\nserver:\n{}",
        out.status,
        end.status,
        out.text,
        end.text
    );
    Ok((out.text, (after - before) / TICKS / took.as_secs_f64()))
}

fn sleep(time: Duration) -> Result<()> {
    std::thread::sleep(time);
    exec::check_interrupt()
}

/// Processor time of some processes, in ticks.
fn ticks(pids: &[u32]) -> Result<f64> {
    let mut all = 0.0;
    for pid in pids {
        let text = fs::read_to_string(format!("/proc/{pid}/stat"))
            .with_context(|| format!("process {pid} is gone"))?;
        all += spent(&text).with_context(|| format!("/proc/{pid}/stat says {text:?}"))?;
    }
    Ok(all)
}

/// utime and stime of a line of /proc/PID/stat, behind a name that may hold anything (proc(5)).
fn spent(stat: &str) -> Option<f64> {
    let words: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some(words.get(11)?.parse::<f64>().ok()? + words.get(12)?.parse::<f64>().ok()?)
}

/// The rows, of what was measured.
pub(super) fn table(ours: &[Cost], rxe: &[Cost], tcp: &[Cost]) -> Vec<FigureRow> {
    let rows = FIGURES.iter().enumerate().map(|(n, figure)| {
        let (ours, rxe, tcp) = (ours.get(n), rxe.get(n).copied(), tcp.get(n).copied());
        let ratio = ours.zip(rxe).map(|(ours, rxe)| ours.value / rxe.value);
        FigureRow {
            row: Row {
                name: figure.name.into(),
                ok: ours.is_some() && tcp.is_some(),
                value: ours.map(|cost| cost.value),
                reference: rxe.map(|cost| cost.value),
                ratio,
                unit: figure.kind.unit().into(),
                target: if figure.kind == Kind::Latency { "<=0.1" } else { ">=10" }.into(),
            },
            cpu_us: ours.map(|cost| cost.cpu_us),
            rxe,
            tcp,
        }
    });
    rows.collect()
}

/// Prints what the rows' own table leaves out.
pub(super) fn print(rows: &[FigureRow]) {
    println!("\n{:<24} {:>10} {:>10} {:>12} {:>12}", "", "ours", "TCP", "CPU us", "CPU us, TCP");
    for line in rows {
        let number = |v: Option<f64>| v.map_or_else(|| "-".into(), |v| format!("{v:.3}"));
        println!(
            "{:<24} {:>10} {:>10} {:>12} {:>12}",
            line.row.name,
            number(line.row.value),
            number(line.tcp.map(|cost| cost.value)),
            number(line.cpu_us),
            number(line.tcp.map(|cost| cost.cpu_us))
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_timed_runs_are_found() {
        let lat = concat!(
            " #bytes        #iterations       t_avg[usec]    tps average\n",
            " 64             21000          14.02          71326.7\n",
            "-----\n"
        );
        assert_eq!(Kind::Latency.of_perftest(lat), Some(14.02));
        let bw = concat!(
            " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n",
            " 65536      300              0.00               0.10                 0.000193\n"
        );
        assert_eq!(Kind::Bandwidth.of_perftest(bw), Some(0.10));
        assert_eq!(Kind::Rate.of_perftest(bw), Some(0.000_193));
        assert_eq!(Kind::Rate.of_perftest("Couldn't connect\n"), None);
    }

    #[test]
    fn qperf_is_read_in_each_of_its_units() {
        let near = |a: Option<f64>, b: f64| a.is_some_and(|a| (a / b - 1.0).abs() < 1e-9);
        assert!(near(Kind::Latency.of_qperf("tcp_lat:\n    latency  =  252 us\n", 64.0), 252.0));
        assert!(near(Kind::Latency.of_qperf("tcp_lat:\n    latency  =  1.5 ms\n", 64.0), 1500.0));
        let bw = "tcp_bw:\n    bw  =  1.25 GB/sec\n";
        assert!(near(Kind::Bandwidth.of_qperf(bw, 65536.0), 10.0));
        assert!(near(Kind::Rate.of_qperf("tcp_bw:\n    bw  =  64 MB/sec\n", 64.0), 1.0));
        assert_eq!(Kind::Rate.of_qperf("tcp_bw:\n    bw  =  64 parsecs\n", 64.0), None);
    }

    #[test]
    fn processor_time_is_found_behind_any_name() {
        let line = "12 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 70 30 0 0 20";
        assert_eq!(spent(line), Some(100.0));
        assert_eq!(spent("12 (a"), None);
    }

    #[test]
    fn a_message_costs_the_time_of_its_share() {
        let figure = &FIGURES[0];
        assert!((cost(figure, 10.0, 2.0).cpu_us - 20.0).abs() < 1e-9);
    }
}
