//! `check --address IP [--connect HOST:PORT]`: a virtual guest that moves data with `vrdma-check`,
//! or with another of its kind, and looks at every byte.

use std::net::{IpAddr, TcpListener};
use std::time::Duration;

use clap::Parser;
use virtual_guest::check::{self, Op, Terms, gid_of};
use virtual_guest::daemon::DaemonOptions;
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::world::{Node, World};

#[derive(Debug, Parser)]
#[command(
    about = "Moves data from a virtual guest on a NIC of $VHOST_RDMA_BACKING and verifies it"
)]
struct Args {
    /// The NIC's address
    #[arg(long)]
    address: IpAddr,
    /// What the NIC may reach, as `vhost-rdma peer add` takes it; ADDRESS or ADDRESS=THROUGH
    #[arg(long)]
    peer: String,
    /// Our address as the peer must name it, if it is another
    #[arg(long, value_name = "IP")]
    tell: Option<IpAddr>,
    /// The peer's address as we name it, if it is another than it tells
    #[arg(long, value_name = "IP")]
    call: Option<IpAddr>,
    /// The server to connect to; without it we serve
    #[arg(long, value_name = "HOST:PORT")]
    connect: Option<String>,
    /// The port to serve on
    #[arg(long, default_value_t = 18600)]
    port: u16,
    /// The longest message
    #[arg(long, default_value_t = 65_537)]
    most: u32,
    /// Measure instead: this many writes of --most bytes
    #[arg(long, value_name = "COUNT", requires = "connect")]
    stream: Option<u32>,
    /// What to do as a client
    #[arg(value_enum)]
    ops: Vec<Op>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let world = World::with(&DaemonOptions::default(), Duration::from_secs(300));
    let mut peer = vec!["peer", "add", "--network", "net"];
    match args.peer.split_once('=') {
        None => peer.push(&args.peer),
        Some((address, through)) => peer.extend([address, "--through", through]),
    }
    world.daemon.run(&peer);
    let options = ["--backing", &virtual_guest::daemon::backing()];
    let socket = world.daemon.add_nic("check", "net", &options);
    let guest = Guest::connect(&socket, GuestConfig::default())
        .map_err(|error| format!("no connection to the NIC: {error:?}"))?;
    let node = Node::start("check".to_owned(), socket, guest, gid_of(args.address));
    let terms = Terms { tell: args.tell.unwrap_or(args.address), call: args.call, most: args.most };
    match (&args.connect, args.stream) {
        (None, _) => {
            let listener = TcpListener::bind(("0.0.0.0", args.port))?;
            let moved = check::serve(&listener, &node, terms);
            println!("served: {} messages, {} bytes, all verified", moved.messages, moved.bytes);
        }
        (Some(server), Some(count)) => {
            let took = check::stream(server, &node, terms, (args.most, count)).as_secs_f64();
            let gigabits = f64::from(count) * f64::from(args.most) * 8.0 / took / 1e9;
            println!("{count} writes of {} bytes: {gigabits:.4} Gb/s", args.most);
        }
        (Some(server), None) => {
            let all = check::client(server, &node, terms, &args.ops);
            for (op, moved) in args.ops.iter().zip(all) {
                println!("{op:?}: {} messages, {} bytes, verified", moved.messages, moved.bytes);
            }
        }
    }
    Ok(())
}
