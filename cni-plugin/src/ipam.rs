//! Addresses, by the IPAM plugin that the network configuration names.
//!
//! IPAM plugins file an address under container and interface. With Multus that interface is
//! `CNI_IFNAME`; without, one call attaches several NICs, and each asks under the name of its own
//! interface in the pod.

use std::time::Duration;

use cni_skel::{AddResult, Cidr, Code, Error, Ipam, Network, Refusal, ValidAttachment};
use serde_json::{Value, json};
use vhost_rdma_agent_api::{Checked, Kind, Nic, Personality, Step};

use crate::agent::{Agent, valid_id};

/// How long giving back may take. It comes before the rest is undone, and whoever has that done
/// waits for half a minute.
const BACK: Duration = Duration::from_secs(15);

/// Whether and whom a NIC asks for addresses: not one whose pool fixes them, nor one that has no
/// interface to have them. (That of a function on vfio is made by the program that drives it, and a
/// NIC for processes has addresses without one.)
pub(crate) fn step(network: &Network, nic: &Nic) -> Result<Option<Step>, Error> {
    let plugin = network.config.ipam_kind()?;
    let plugin = plugin.filter(|_| nic.addresses.is_empty() && can_have(nic));
    Ok(plugin.map(|plugin| Step::Ipam { plugin: plugin.to_owned(), if_name: nic.if_name.clone() }))
}

fn can_have(nic: &Nic) -> bool {
    has_interface(nic) || matches!(nic.personality.kind(), Kind::VfVfio | Kind::Process)
}

/// The addresses of a NIC: those that its pool fixes, or what the IPAM plugin gives; no IPAM, no
/// addresses.
pub(crate) fn add(network: &Network, nic: &Nic) -> Result<AddResult, Refusal> {
    let asked = &network.config.runtime.ips;
    if step(network, nic)?.is_none() {
        // Those that the pool fixes; if there is no IPAM plugin, those that the runtime asks for.
        let by_runtime = asked.iter().filter(|_| nic.addresses.is_empty() && can_have(nic));
        let fixed: Vec<Value> = nic
            .addresses
            .iter()
            .cloned()
            .chain(by_runtime.map(ToString::to_string))
            .map(|address| json!({ "address": address }))
            .collect();
        refuse_others(asked, &fixed)?;
        return Ok(AddResult::from_json(&json!({ "ips": fixed }), network.version)
            .map_err(|error| error.during(&format!("the addresses of NIC {}", nic.id)))?);
    }
    let ipam = Ipam::of(network)?;
    let given =
        ipam.map_or_else(|| Ok(AddResult::default()), |ipam| ipam.ifname(&nic.if_name).add())?;
    let addresses = given.ips.iter().map(|ip| json!({ "address": ip.address.to_string() }));
    refuse_others(asked, &addresses.collect::<Vec<_>>())?;
    Ok(given)
}

/// Addresses that the runtime asks for (`ips`) are given, or the call fails: an IPAM plugin that
/// does not know them passes over them.
fn refuse_others(asked: &[Cidr], given: &[Value]) -> Result<(), Error> {
    let has = |wanted: &&Cidr| {
        let address = |text: &str| text.split_once('/').map_or(text, |(ip, _)| ip).parse().ok();
        let given = given.iter().filter_map(|given| given.get("address")?.as_str());
        given.into_iter().any(|given| address(given) == Some(wanted.address))
    };
    let Some(missing) = asked.iter().find(|wanted| !has(wanted)) else { return Ok(()) };
    let msg = format!("runtimeConfig.ips: {missing} is not supported by what gives the addresses");
    Err(Error::new(Code::UNSUPPORTED_FIELD, msg)
        .details("the pool fixes others, or the ipam plugin does not know the capability \"ips\""))
}

/// Gives the addresses of an interface back.
pub(crate) fn del(network: &Network, if_name: &str) -> Result<(), Error> {
    Ipam::of(network)?.map_or(Ok(()), |ipam| ipam.ifname(if_name).timeout(BACK).del())
}

/// Asks whether the addresses of an interface are still given to it.
pub(crate) fn check(network: &Network, if_name: &str) -> Result<(), Error> {
    Ipam::of(network)?.map_or(Ok(()), |ipam| ipam.ifname(if_name).check())
}

/// DEL for which nothing is written down: if there is an address after all (a ledger was lost), it
/// is given back. Nobody waits for this, so nothing fails by it.
pub(crate) fn release_unrecorded(network: &Network) {
    if let Ok(Some(ipam)) = Ipam::of(network)
        && let Err(error) = ipam.del()
    {
        eprintln!("vhost-rdma: {error}");
    }
}

/// Passes GC on, with the interfaces under which addresses were asked for beside those that the
/// runtime names.
pub(crate) fn collect(
    network: &Network,
    agent: &Agent,
    valid: &[ValidAttachment],
) -> Result<(), Error> {
    let Some(ipam) = Ipam::of(network)? else { return Ok(()) };
    let mut keep = valid.to_vec();
    for attachment in valid {
        // Without all of them nothing can be called stale.
        let checked = agent.check(valid_id(attachment))?;
        keep.extend(checked.iter().flat_map(interfaces).map(|ifname| ValidAttachment {
            container_id: attachment.container_id.clone(),
            ifname,
        }));
    }
    let mut config = network.config.document().clone();
    for key in ["cni.dev/valid-attachments", "cni.dev/attachments"] {
        config.insert(key.to_owned(), json!(keep));
    }
    known(ipam.config(&config).gc())
}

/// Passes STATUS on.
pub(crate) fn status(network: &Network) -> Result<(), Error> {
    Ipam::of(network)?.map_or(Ok(()), |ipam| known(ipam.status()))
}

fn interfaces(checked: &Checked) -> impl Iterator<Item = String> {
    checked.record.steps.iter().filter_map(|step| match step {
        Step::Ipam { if_name, .. } => Some(if_name.clone()),
        _ => None,
    })
}

/// A plugin from before 1.1.0 does not know the command, and says that `CNI_COMMAND` is bad: that
/// is no failure of the node.
fn known(answer: Result<(), Error>) -> Result<(), Error> {
    answer
        .or_else(|error| if error.code == Code::INVALID_ENVIRONMENT { Ok(()) } else { Err(error) })
}

/// Whether the NIC has a netdev in the pod.
pub(crate) fn has_interface(nic: &Nic) -> bool {
    match &nic.personality {
        Personality::VhostUser { companion, .. } => companion.bridge.is_some(),
        Personality::Vf { .. } => true,
        Personality::VfVfio { .. } | Personality::Shared { .. } | Personality::Process { .. } => {
            false
        }
    }
}
