//! What the `rdma` tool does, in a hundred lines, with JSON: to be laid beside `rdma -j` and
//! `ip -j`.
//!
//! ```text
//! rdma-json [show [NETNS]]            devices, ports, objects, counters and interfaces;
//!                                     NETNS is a path such as /run/netns/blue
//! rdma-json add NAME rxe|siw NETDEV   make a software device
//! rdma-json delete NAME
//! rdma-json rename OLD NEW
//! rdma-json move NAME NETNS [NEW]     to another namespace, perhaps under another name
//! rdma-json fetch NETNS NAME          back from there
//! rdma-json mode shared|exclusive
//! rdma-json monitor COUNT             wait for announcements
//! ```

use rdma_netlink::link::Links;
use rdma_netlink::rdma::{
    CompletionQueue, ConnectionId, Context, MemoryRegion, Monitor, NetnsMode, ProtectionDomain,
    QueuePair, Rdma, SharedReceiveQueue,
};
use rdma_netlink::{Error, Netns, Result};
use serde_json::{Value, json};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    if let Err(error) = run(&args) {
        eprintln!("rdma-json: {error}");
        std::process::exit(if error.is_not_found() { 4 } else { 1 });
    }
}

fn run(args: &[&str]) -> Result<()> {
    match args {
        [] | ["show"] => show(&Netns::current()?),
        ["show", netns] => show(&Netns::from_path(netns)?),
        ["add", name, kind, netdev] => Rdma::open()?.add_link(name, kind, netdev),
        ["delete", name] => with(name, Rdma::delete_link),
        ["rename", old, new] => with(old, |rdma, index| rdma.rename(index, new)),
        ["move", name, netns] => {
            let netns = Netns::from_path(netns)?;
            with(name, |rdma, index| rdma.move_to(index, &netns, None))
        }
        ["move", name, netns, new] => {
            let netns = Netns::from_path(netns)?;
            with(name, |rdma, index| rdma.move_to(index, &netns, Some(new)))
        }
        ["fetch", netns, name] => {
            let mut there = Rdma::open_in(&Netns::from_path(netns)?)?;
            let index = there.by_name(name)?.index;
            there.move_to(index, &Netns::current()?, None)
        }
        ["mode", "shared"] => Rdma::open()?.set_netns_mode(NetnsMode::Shared),
        ["mode", "exclusive"] => Rdma::open()?.set_netns_mode(NetnsMode::Exclusive),
        ["monitor", count] => {
            let count =
                count.parse().map_err(|_| Error::Invalid("COUNT is a number".to_owned()))?;
            monitor(count)
        }
        _ => Err(Error::Invalid("see the head of examples/rdma-json.rs".to_owned())),
    }
}

fn with(name: &str, work: impl FnOnce(&mut Rdma, u32) -> Result<()>) -> Result<()> {
    let mut rdma = Rdma::open()?;
    let index = rdma.by_name(name)?.index;
    work(&mut rdma, index)
}

fn monitor(count: usize) -> Result<()> {
    let mut monitor = Monitor::open()?;
    println!("\"listening\"");
    let mut seen = 0;
    while seen < count {
        for event in monitor.wait()? {
            println!("{}", json!(event));
            seen += 1;
        }
    }
    Ok(())
}

fn show(netns: &Netns) -> Result<()> {
    let mut rdma = Rdma::open_in(netns)?;
    let mut devices = Vec::new();
    for device in rdma.devices()? {
        devices.push(details(&mut rdma, device.index, &json!(device))?);
    }
    let document = json!({
        "system": rdma.system()?,
        "devices": devices,
        "interfaces": Links::open_in(netns)?.list()?,
    });
    println!("{document:#}");
    Ok(())
}

fn details(rdma: &mut Rdma, index: u32, device: &Value) -> Result<Value> {
    let ports = rdma.ports(index)?;
    let mut counters = Vec::new();
    for port in &ports {
        counters.push(rdma.counters(index, port.port).unwrap_or_default());
    }
    Ok(json!({
        "device": device,
        "ports": ports,
        "counters": counters,
        "uverbs": rdma.char_device("uverbs", Some(index), None).ok(),
        "counts": rdma.resource_counts(index)?,
        "qp": rdma.resources::<QueuePair>(index)?,
        "cm_id": rdma.resources::<ConnectionId>(index)?,
        "cq": rdma.resources::<CompletionQueue>(index)?,
        "mr": rdma.resources::<MemoryRegion>(index)?,
        "pd": rdma.resources::<ProtectionDomain>(index)?,
        "ctx": rdma.resources::<Context>(index)?,
        "srq": rdma.resources::<SharedReceiveQueue>(index)?,
    }))
}
