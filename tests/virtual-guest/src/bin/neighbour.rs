//! `neighbour SOCKET SOCKET`: two virtual guests on NICs of a running daemon that write to each
//! other until standard input ends.
//!
//! It says `ready` when traffic flows, and at the end, as JSON, how many requests there were, how
//! many of them failed, and what a round trip took: for scenarios in which something happens to
//! somebody else.

use std::io::{Read as _, Write as _};
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use clap::Parser;
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::qp::{Path, SendWr};
use virtual_guest::spec::status;
use virtual_guest::world::{Node, ipv4_gid};

#[derive(Debug, Parser)]
#[command(about = "Two virtual guests on a running daemon, as witnesses that nothing happened")]
struct Args {
    /// The vhost-user sockets of two NICs of one network
    #[arg(num_args = 2)]
    sockets: Vec<PathBuf>,
}

fn node(socket: &FilePath, number: u8) -> anyhow::Result<Node> {
    let guest = Guest::connect(socket, GuestConfig::default())
        .map_err(|error| anyhow::anyhow!("{}: {error:?}", socket.display()))?;
    Ok(Node::start(format!("neighbour {number}"), socket.to_path_buf(), guest, ipv4_gid(9, number)))
}

/// Nanoseconds below which so many of a hundred lie.
fn percentile(sorted: &[u64], of_hundred: usize) -> u64 {
    sorted.get(sorted.len().saturating_sub(1) * of_hundred / 100).copied().unwrap_or(0)
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let nodes: Vec<Node> =
        args.sockets.iter().zip(1..).map(|(s, n)| node(s, n)).collect::<Result<_, _>>()?;
    let [a, b] = nodes.as_slice() else { anyhow::bail!("two sockets are needed") };
    let (mut here, there) = (a.rc(), b.rc());
    here.connect(&there, &Path::hasty());
    there.connect(&here, &Path::hasty());
    let word = b.area(64);
    let over = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&over);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        ended.store(true, Ordering::Relaxed);
    });
    let (mut times, mut failed) = (Vec::new(), 0u64);
    while !over.load(Ordering::Relaxed) {
        let begin = Instant::now();
        let write = SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[7; 8]);
        if here.run(&write).status != status::SUCCESS {
            failed += 1;
            // What follows would only be flushed.
            break;
        }
        times.push(u64::try_from(begin.elapsed().as_nanos())?);
        if times.len() == 100 {
            println!("ready");
            std::io::stdout().flush()?;
        }
    }
    times.sort_unstable();
    let micros = |of_hundred| percentile(&times, of_hundred) as f64 / 1e3;
    println!(
        "{}",
        serde_json::json!({
            "requests": times.len() as u64 + failed,
            "failed": failed,
            "p50_us": micros(50),
            "p99_us": micros(99),
            "most_us": micros(100),
        })
    );
    Ok(())
}
