//! Prints what the kernel knows about RDMA devices and network interfaces as one JSON document: to be laid beside `rdma -j` and `ip -j`.
//!
//! `rdma-json [NETNS]`: NETNS is a path such as `/run/netns/blue`.

use rdma_netlink::link::Links;
use rdma_netlink::rdma::{
    CompletionQueue, ConnectionId, Context, MemoryRegion, ProtectionDomain, QueuePair, Rdma,
    SharedReceiveQueue,
};
use rdma_netlink::{Netns, Result};
use serde_json::{Value, json};

fn main() -> Result<()> {
    let netns = match std::env::args().nth(1) {
        Some(path) => Netns::from_path(path)?,
        None => Netns::current()?,
    };
    let mut rdma = Rdma::open_in(&netns)?;
    let mut devices = Vec::new();
    for device in rdma.devices()? {
        devices.push(details(&mut rdma, device.index, &json!(device))?);
    }
    let document = json!({
        "system": rdma.system()?,
        "devices": devices,
        "interfaces": Links::open_in(&netns)?.list()?,
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
