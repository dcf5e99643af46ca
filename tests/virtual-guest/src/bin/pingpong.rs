//! `pingpong --address IP [--connect HOST:PORT]`: a virtual guest that plays `ibv_rc_pingpong` with
//! whoever speaks it.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use clap::Parser;
use virtual_guest::daemon::DaemonOptions;
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::qp::QpSpec;
use virtual_guest::spec::qpt;
use virtual_guest::third_party::{Game, Side, rc_pingpong};
use virtual_guest::third_party_cm::{CmSide, cmatose};
use virtual_guest::world::{Node, World};

#[derive(Debug, Parser)]
#[command(about = "Plays ibv_rc_pingpong from a virtual guest on a NIC of $VHOST_RDMA_BACKING")]
struct Args {
    /// The NIC's address
    #[arg(long)]
    address: IpAddr,
    /// Addresses that the NIC may reach
    #[arg(long)]
    peer: String,
    /// The server to connect to; without it we serve
    #[arg(long, value_name = "HOST:PORT")]
    connect: Option<String>,
    /// Set up by the connection manager and play ucmatose, with a peer at this address
    #[arg(long, value_name = "IP")]
    cm: Option<Ipv4Addr>,
    /// The port to serve on
    #[arg(long, default_value_t = 18515)]
    port: u16,
    /// Bytes of a message
    #[arg(long, default_value_t = 4096)]
    size: u32,
    /// Messages each way
    #[arg(long, default_value_t = 1000)]
    iterations: u32,
    /// Path MTU in verbs' encoding
    #[arg(long, default_value_t = 3)]
    mtu: u8,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let ports = args.cm.map(|_| ["--cm-port".to_owned(), args.port.to_string()]);
    let ports = ports.into_iter().flatten().collect();
    let options = DaemonOptions { args: ports, ..DaemonOptions::default() };
    let world = World::with(&options, Duration::from_secs(300));
    world.daemon.run(&["peer", "add", &args.peer, "--network", "net"]);
    let options = ["--backing", &virtual_guest::daemon::backing()];
    let socket = world.daemon.add_nic("pingpong", "net", &options);
    let guest = Guest::connect(&socket, GuestConfig::default())
        .map_err(|error| format!("no connection to the NIC: {error:?}"))?;
    let gid = match args.address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    let node = Node::start("pingpong".to_owned(), socket, guest, gid);
    let mut end = node.end(&QpSpec { rq: 128, ..QpSpec::new(qpt::RC) });
    if let Some(peer) = args.cm {
        let side = match &args.connect {
            Some(_) => CmSide::Client(peer, args.port),
            None => CmSide::Server(peer),
        };
        cmatose(&mut end, side, args.iterations, args.size);
        return Ok(());
    }
    let side = args.connect.map_or(Side::Server(args.port), Side::Client);
    let game = Game { size: args.size, iterations: args.iterations, mtu: args.mtu };
    let took = rc_pingpong(&mut end, &side, game);
    let micros = took.as_secs_f64() * 1e6 / f64::from(game.iterations);
    println!("{} iterations of {} bytes, {micros:.2} usec/iter", game.iterations, game.size);
    Ok(())
}
