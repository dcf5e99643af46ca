//! The unmodified programs of the demo, how each is called, and how its figure is read.
//!
//! A row is run the same way on any RDMA device; only the device's name, the GID index and the
//! number of iterations differ. Guest b serves, guest a is the client.

use anyhow::{Context, Result};

/// How a program's figure is found in the client's output.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Figure {
    /// `… usec/iter` of the pingpong tools.
    PingPong,
    /// Column of perftest's last line, counted from 0.
    Column(usize),
    /// The `"seconds"` of vrdma-check's report.
    Check,
    /// The client's wall time.
    Seconds,
    /// The last word before this one, at the end of a line.
    Before(&'static str),
}

/// What the bytes and messages of a run must at least be, both directions of the client's NIC
/// together.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Claim {
    /// Nothing moves.
    None,
    /// So many payload bytes per iteration.
    Bytes(u64),
    /// What the client's own report says.
    Reported,
    /// So many messages in all: programs that exchange little and say nothing of sizes.
    Messages(u64),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Program {
    /// The row's name.
    pub(crate) name: &'static str,
    /// Command lines with `{dev} {gid} {n}` and, for the client, `{peer}`; an empty server is none.
    pub(crate) server: &'static str,
    pub(crate) client: &'static str,
    /// The server listens on this TCP port before it is of use; 0: it listens with rdma_cm.
    pub(crate) port: u16,
    pub(crate) figure: Figure,
    pub(crate) unit: &'static str,
    /// Bound for ours divided by the reference.
    pub(crate) target: &'static str,
    /// Iterations on the reference device and on ours; a fast device needs more for a figure that
    /// means something.
    pub(crate) reference_n: u32,
    pub(crate) n: u32,
    pub(crate) claim: Claim,
    /// Text that the client's output must contain.
    pub(crate) expect: &'static str,
}

const LATENCY: &str = "<=0.1";
const BANDWIDTH: &str = ">=10";
const PINGPONG_PORT: u16 = 18515;
const CHECK_PORT: u16 = 18600;

const fn pingpong(name: &'static str, both: (&'static str, &'static str), size: u64) -> Program {
    Program {
        name,
        server: both.0,
        client: both.1,
        port: PINGPONG_PORT,
        figure: Figure::PingPong,
        unit: "us",
        target: LATENCY,
        reference_n: 300,
        n: 2000,
        claim: Claim::Bytes(2 * size),
        expect: "usec/iter",
    }
}

const fn perftest(
    name: &'static str,
    both: (&'static str, &'static str),
    latency: bool,
    bytes: u64,
) -> Program {
    Program {
        name,
        server: both.0,
        client: both.1,
        port: PINGPONG_PORT,
        figure: if latency { Figure::Column(4) } else { Figure::Column(3) },
        unit: if latency { "us" } else { "Gb/s" },
        target: if latency { LATENCY } else { BANDWIDTH },
        reference_n: 300,
        n: if latency { 2000 } else { 4000 },
        claim: Claim::Bytes(bytes),
        expect: "#iterations",
    }
}

macro_rules! both {
    ($cmd:literal) => {
        ($cmd, concat!($cmd, " {peer}"))
    };
}

const KIB64: u64 = 64 * 1024;

/// Largest transfer of vrdma-check, one more than 1 MiB: the same on both devices, so that seconds
/// compare.
const fn check(name: &'static str, client: &'static str) -> Program {
    Program {
        name,
        server: "vrdma-check -d {dev} -g {gid}",
        client,
        port: CHECK_PORT,
        figure: Figure::Check,
        unit: "s",
        target: "",
        reference_n: 1,
        n: 1,
        claim: Claim::Reported,
        expect: "\"ok\":true",
    }
}

/// In the order of the table.
pub(crate) const PROGRAMS: &[Program] = &[
    Program {
        name: "ibv_devinfo",
        server: "",
        client: "ibv_devinfo -v -d {dev}",
        port: 0,
        figure: Figure::Seconds,
        unit: "s",
        target: "",
        reference_n: 1,
        n: 1,
        claim: Claim::None,
        expect: "PORT_ACTIVE",
    },
    pingpong(
        "ibv_rc_pingpong -c",
        both!("ibv_rc_pingpong -d {dev} -g {gid} -n {n} -s 4096 -c"),
        4096,
    ),
    pingpong("ibv_uc_pingpong", both!("ibv_uc_pingpong -d {dev} -g {gid} -n {n} -s 4096 -c"), 4096),
    pingpong("ibv_ud_pingpong", both!("ibv_ud_pingpong -d {dev} -g {gid} -n {n} -s 1024 -c"), 1024),
    pingpong(
        "ibv_srq_pingpong",
        both!("ibv_srq_pingpong -d {dev} -g {gid} -n {n} -s 4096 -q 16 -c"),
        4096,
    ),
    pingpong(
        "ibv_rc_pingpong -e",
        both!("ibv_rc_pingpong -d {dev} -g {gid} -n {n} -s 4096 -c -e"),
        4096,
    ),
    pingpong(
        "ibv_uc_pingpong -e",
        both!("ibv_uc_pingpong -d {dev} -g {gid} -n {n} -s 4096 -c -e"),
        4096,
    ),
    pingpong(
        "ibv_ud_pingpong -e",
        both!("ibv_ud_pingpong -d {dev} -g {gid} -n {n} -s 1024 -c -e"),
        1024,
    ),
    pingpong(
        "ibv_srq_pingpong -e",
        both!("ibv_srq_pingpong -d {dev} -g {gid} -n {n} -s 4096 -q 16 -c -e"),
        4096,
    ),
    perftest(
        "ib_write_bw",
        both!("ib_write_bw -d {dev} -x {gid} -n {n} -s 65536 -F --report_gbits"),
        false,
        KIB64,
    ),
    perftest(
        "ib_read_bw",
        both!("ib_read_bw -d {dev} -x {gid} -n {n} -s 65536 -F --report_gbits"),
        false,
        KIB64,
    ),
    perftest(
        "ib_send_bw",
        both!("ib_send_bw -d {dev} -x {gid} -n {n} -s 65536 -F --report_gbits"),
        false,
        KIB64,
    ),
    Program {
        figure: Figure::Column(4),
        unit: "Mops/s",
        reference_n: 2000,
        n: 20000,
        ..perftest(
            "ib_atomic_bw",
            both!("ib_atomic_bw -d {dev} -x {gid} -n {n} -F --report_gbits"),
            false,
            8,
        )
    },
    perftest("ib_write_lat", both!("ib_write_lat -d {dev} -x {gid} -n {n} -s 64 -F"), true, 128),
    perftest("ib_read_lat", both!("ib_read_lat -d {dev} -x {gid} -n {n} -s 64 -F"), true, 64),
    perftest("ib_send_lat", both!("ib_send_lat -d {dev} -x {gid} -n {n} -s 64 -F"), true, 128),
    perftest("ib_atomic_lat", both!("ib_atomic_lat -d {dev} -x {gid} -n {n} -F"), true, 8),
    check("vrdma-check write", "vrdma-check -c {peer} -d {dev} -g {gid} write"),
    check("vrdma-check write-imm", "vrdma-check -c {peer} -d {dev} -g {gid} write-imm"),
    check("vrdma-check read", "vrdma-check -c {peer} -d {dev} -g {gid} read"),
    check("vrdma-check send", "vrdma-check -c {peer} -d {dev} -g {gid} send"),
    check("vrdma-check atomic", "vrdma-check -c {peer} -d {dev} -g {gid} atomic"),
    Program {
        name: "rping -v",
        server: "rping -s -a 0.0.0.0 -v -C {n} > /dev/null",
        client: "rping -c -a {peer} -v -C {n}",
        port: 0,
        figure: Figure::Seconds,
        unit: "s",
        target: "",
        reference_n: 20,
        n: 20,
        claim: Claim::Bytes(128),
        expect: "rdma-ping-19",
    },
    Program {
        name: "ucmatose",
        server: "ucmatose -C {n} -S 4096 -c 4",
        client: "ucmatose -s {peer} -C {n} -S 4096 -c 4",
        port: 0,
        figure: Figure::Seconds,
        unit: "s",
        target: "",
        reference_n: 10,
        n: 10,
        claim: Claim::Bytes(2 * 4 * 4096),
        expect: "data transfers complete",
    },
    Program {
        name: "udaddy",
        server: "udaddy -C {n} -S 1024",
        client: "udaddy -s {peer} -C {n} -S 1024",
        port: 0,
        figure: Figure::Seconds,
        unit: "s",
        target: "",
        reference_n: 10,
        n: 10,
        claim: Claim::Messages(20),
        expect: "data transfers complete",
    },
];

/// Programs that need two CPUs in each guest: TCG makes a guest's atomic instructions atomic
/// towards the host only then.
pub(crate) const CONTENDED: &[Program] =
    &[check("vrdma-check atomic -t 2", "vrdma-check -c {peer} -d {dev} -g {gid} -t 2 atomic")];

/// A line of vrdma-check.
#[derive(Debug, serde::Deserialize)]
struct Report {
    bytes: u64,
    seconds: f64,
}

fn reports(text: &str) -> impl Iterator<Item = Report> {
    text.lines().filter_map(|l| serde_json::from_str(l).ok())
}

impl Claim {
    /// Bytes and messages that a run of `n` iterations with this output must have moved.
    pub(crate) fn of(self, n: u32, text: &str) -> (u64, u64) {
        match self {
            Self::None => (0, 0),
            Self::Bytes(each) => (each * u64::from(n), 1),
            Self::Messages(all) => (0, all),
            Self::Reported => (reports(text).map(|r| r.bytes).sum(), 1),
        }
    }
}

impl Figure {
    /// The figure in a client's output.
    pub(crate) fn read(self, text: &str, seconds: f64) -> Result<f64> {
        let found = match self {
            Self::Seconds => Some(seconds),
            Self::PingPong => return Self::Before(" usec/iter").read(text, seconds),
            Self::Before(unit) => {
                text.lines().find_map(|l| l.strip_suffix(unit)?.rsplit(' ').next()?.parse().ok())
            }
            Self::Column(n) => text.lines().rev().find_map(|l| {
                let words: Vec<f64> = l.split_whitespace().map_while(|w| w.parse().ok()).collect();
                (words.len() > 4).then(|| words.get(n).copied())?
            }),
            Self::Check => reports(text).next().map(|r| r.seconds),
        };
        found.with_context(|| "no figure in the output".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found() {
        let pingpong = "  local address:  LID 0x0000\n\
                        8192000 bytes in 0.33 seconds = 200.00 Mbit/sec\n\
                        1000 iters in 0.33 seconds = 327.68 usec/iter\n";
        assert_eq!(Figure::PingPong.read(pingpong, 0.0).ok(), Some(327.68));
        let bw = concat!(
            " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n",
            " 65536      300              0.11               0.10                 0.000193\n",
            "-----\n"
        );
        assert_eq!(Figure::Column(3).read(bw, 0.0).ok(), Some(0.10));
        let lat = concat!(
            " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]\n",
            " 64      300          300.5          9000.1       518.25            1251.0    12\n"
        );
        assert_eq!(Figure::Column(4).read(lat, 0.0).ok(), Some(518.25));
        assert!(Figure::Column(4).read("no table\n", 0.0).is_err());
    }

    #[test]
    fn names_are_unique() {
        for (n, p) in PROGRAMS.iter().enumerate() {
            assert!(PROGRAMS.iter().skip(n + 1).all(|q| q.name != p.name), "{}", p.name);
        }
    }
}
