//! What the way through the daemon costs: `cargo xtask vm rnic --cost`.
//!
//! Each row is a ratio. Its two sides run in the same host VM, on the same rxe device, towards the
//! same plain rxe peer with the same passive or stock server, by turns, and the median of each side
//! counts. One side is a stock program on the device itself; the other is a virtual guest that
//! posts the same work through its rings and the daemon. The VMs have two CPUs here, as both sides
//! of a NIC need one. In an emulated machine rxe costs so much that little of a daemon is seen
//! behind it; what the daemon adds to a work request by itself is a row of `cargo xtask bench`.

use std::time::Duration;

use anyhow::{Context, Result};

use super::verified::meet;
use super::{Args, OURS};
use crate::rows::Row;
use crate::vm::guest::{Guest, Output};
use crate::vm::programs::Figure;

/// Samples of each side.
const ROUNDS: usize = 3;
const SAMPLE: Duration = Duration::from_secs(300);
/// Where perftest and the pingpongs meet, and where vrdma-check does.
const STOCK_PORT: &str = "4853";
const CHECK_PORT: &str = "48A8";
/// The host's own address for its stock programs, which no guest has.
const GID: &str = "ulimit -l unlimited
gid=$(grep -ls ':ffff:@GID@$' /sys/class/infiniband/rxe0/ports/1/gids/* | head -n 1); gid=${gid##*/}
";
const HERE: &str = "0a00:0028";
const THERE: &str = "0a00:00c8";

/// One side of a ratio: commands of the server and of the client, their port, and where the client
/// says its figure.
struct Half {
    server: String,
    client: String,
    port: &'static str,
    figure: Figure,
}

struct Cost {
    name: &'static str,
    unit: &'static str,
    target: &'static str,
    plain: Half,
    ours: Half,
}

fn stock(gid: &str, command: &str) -> String {
    format!("{}exec {command}\n", GID.replace("@GID@", gid))
}

fn guest(program: &str, options: &str) -> String {
    let ours = OURS.replace("@BACKING@", "rnic:rxe0");
    format!("{ours}exec /host/products/{program} --address 10.0.0.1 --peer 10.0.0.200 {options}\n")
}

fn costs() -> [Cost; 2] {
    // The timeout of an acknowledgment is 4 s: with perftest's 67 ms two plain rxe devices on a
    // busy machine end in REM_INV_REQ_ERR.
    const WRITE: &str = "ib_write_bw -d rxe0 -x $gid -n 200 -s 65536 -u 20 -F --report_gbits";
    const PINGPONG: &str = "ibv_rc_pingpong -d rxe0 -g $gid -n 200 -s 64";
    [
        Cost {
            name: "cost: write 64 KiB",
            unit: "Gb/s",
            target: ">=0.8",
            plain: Half {
                server: stock(THERE, WRITE),
                client: stock(HERE, &format!("{WRITE} 10.0.0.200")),
                port: STOCK_PORT,
                figure: Figure::Column(3),
            },
            ours: Half {
                server: stock(THERE, "/host/products/vrdma-check -d rxe0 -g $gid"),
                client: guest("check", "--connect 10.0.0.200:18600 --most 65536 --stream 200"),
                port: CHECK_PORT,
                figure: Figure::Before(" Gb/s"),
            },
        },
        Cost {
            name: "cost: round trip of 64 bytes",
            unit: "us",
            target: "<=1.5",
            plain: Half {
                server: stock(THERE, PINGPONG),
                client: stock(HERE, &format!("{PINGPONG} 10.0.0.200")),
                port: STOCK_PORT,
                figure: Figure::PingPong,
            },
            ours: Half {
                server: stock(THERE, PINGPONG),
                client: guest("pingpong", "--connect 10.0.0.200:18515 --size 64 --iterations 200"),
                port: STOCK_PORT,
                figure: Figure::PingPong,
            },
        },
    ]
}

/// One sample; an error tells what both ends said.
fn sample(half: &Half, host: &mut Guest, peer: &mut Guest) -> Result<f64> {
    let (client, server) = meet((peer, &half.server), (host, &half.client), half.port, SAMPLE)?;
    let said = |output: &Output| format!("{:?}: {}", output.status, output.text.trim_end());
    anyhow::ensure!(client.ok() && server.ok(), "{}\n{}", said(&client), said(&server));
    half.figure.read(&client.text, 0.0).with_context(|| said(&client))
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

impl Cost {
    fn row(&self, host: &mut Guest, peer: &mut Guest) -> Result<Row> {
        let (mut plain, mut ours) = (Vec::new(), Vec::new());
        for round in 1..=ROUNDS {
            plain.push(sample(&self.plain, host, peer)?);
            ours.push(sample(&self.ours, host, peer)?);
            eprintln!(
                "{} ({round} of {ROUNDS}): plain {:?}, through the daemon {:?} {}",
                self.name,
                plain.last(),
                ours.last(),
                self.unit
            );
        }
        let (value, reference) = (median(ours), median(plain));
        let ratio = value.zip(reference).map(|(value, reference)| value / reference);
        Ok(Row {
            name: self.name.to_owned(),
            ok: true,
            value,
            reference,
            ratio,
            unit: self.unit.to_owned(),
            target: self.target.to_owned(),
        })
    }
}

impl Args {
    /// All rows of costs. One that does not run is a row that says so.
    pub(super) fn cost(&self, host: &mut Guest, peer: &mut Guest, table: &mut Vec<Row>) {
        for cost in costs() {
            if self.wanted(cost.name) {
                let row = cost.row(host, peer).unwrap_or_else(|error| {
                    eprintln!("{}: {error:#}", cost.name);
                    Row::verdict(cost.name, false)
                });
                table.push(row);
            }
        }
    }
}
