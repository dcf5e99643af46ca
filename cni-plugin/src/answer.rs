//! What the agent answers, looked at before anything is done about it.
//!
//! The agent is trusted (only root can listen where it listens, see [`crate::host`]), but it is
//! another process of perhaps another release, and this one is root in the host's network
//! namespace. So an answer is held against the question and against what this plugin makes: it may
//! name interfaces, functions and devices by well-formed names, a number of NICs that a pod can
//! have, and of the host's own links only those whose names are derived from the NIC and the
//! container that the call is about.

use std::collections::BTreeSet;

use cni_skel::{Code, Error, valid_ifname};
use vhost_rdma_agent_api::{Nic, Personality, Record, Step};

use crate::{companion, names};

/// NICs of one pod. The kubelet's own bound is the node's capacity; nobody gives a pod more
/// interfaces than this.
const NICS_MAX: usize = 256;
/// Steps of one attachment: no kind makes more than six.
const STEPS_MAX: usize = 64;
/// An ID or a name that is not an interface's.
const NAME_MAX: usize = 128;

/// The NICs to attach: those that were asked for.
///
/// # Errors
/// Code 999, with what makes no sense.
pub(crate) fn nics(nics: &[Nic], device: Option<&str>, ifname: &str) -> Result<(), Error> {
    if nics.len() > NICS_MAX {
        return Err(bad(&format!("{} NICs for one pod", nics.len())));
    }
    if let Some(device) = device
        && !matches!(nics, [nic] if nic.id == device && nic.if_name == ifname)
    {
        return Err(bad(&format!("other NICs than {device} as {ifname}, which was asked for")));
    }
    let (mut ids, mut names) = (BTreeSet::new(), BTreeSet::new());
    for nic in nics {
        well_formed(nic)?;
        if !ids.insert(&nic.id) || !names.insert(&nic.if_name) {
            return Err(bad(&format!("NIC {} or its interface {} twice", nic.id, nic.if_name)));
        }
    }
    Ok(())
}

/// What is to be undone for one container, or, in GC, for any.
///
/// # Errors
/// As [`nics`].
pub(crate) fn records(records: &[Record], container: Option<&str>) -> Result<(), Error> {
    for record in records {
        let of = &record.attachment.container_id;
        if container.is_some_and(|container| container != of) {
            return Err(bad(&format!("an attachment of another container, {of}")));
        }
        if record.steps.len() > STEPS_MAX {
            return Err(bad(&format!("{} steps for NIC {}", record.steps.len(), record.nic.id)));
        }
        well_formed(&record.nic)?;
        record.steps.iter().try_for_each(|step| possible(step, &record.nic, of))?;
    }
    Ok(())
}

fn well_formed(nic: &Nic) -> Result<(), Error> {
    let id = !nic.id.is_empty() && nic.id.len() <= NAME_MAX && !nic.id.contains(['/', '\0', ' ']);
    let (interfaces, pci, rdma_device): (Vec<&str>, Option<&str>, Option<&str>) =
        match &nic.personality {
            Personality::VhostUser { companion, .. } => {
                let tap = Some(companion.tap.as_str()).filter(|tap| !tap.is_empty());
                (companion.bridge.as_deref().into_iter().chain(tap).collect(), None, None)
            }
            Personality::Process { .. } => (Vec::new(), None, None),
            Personality::Vf { pci, netdev, rdma_device, .. } => {
                (netdev.as_deref().into_iter().collect(), Some(pci), Some(rdma_device))
            }
            Personality::VfVfio { pci } => (Vec::new(), Some(pci), None),
            Personality::Shared { pci, netdev, rdma_device, .. } => {
                (netdev.as_deref().into_iter().collect(), pci.as_deref(), Some(rdma_device))
            }
        };
    let interfaces = interfaces.into_iter().chain([nic.if_name.as_str()]).all(valid_ifname);
    if id && interfaces && pci.is_none_or(is_pci) && rdma_device.is_none_or(is_device) {
        return Ok(());
    }
    Err(bad(&format!("a NIC with a name that cannot be: {:?}", nic.id)))
}

fn possible(step: &Step, nic: &Nic, container: &str) -> Result<(), Error> {
    let pci_ok = |pci: &Option<String>| pci.as_deref().is_none_or(is_pci);
    let possible = match step {
        // On the host there is one link of ours for each NIC: anybody else's must not be removed.
        Step::MakeLink { name, netns: None } => *name == companion::outer(&nic.id, container),
        Step::MakeLink { name, netns: Some(_) } => valid_ifname(name),
        Step::MoveNetdev { host_name, pod_name, pci, altnames, .. } => {
            valid_ifname(host_name)
                && valid_ifname(pod_name)
                && pci_ok(pci)
                && altnames.len() <= names::KEPT
        }
        Step::MoveRdma { host_name, pod_name, pci, .. } => {
            is_device(host_name) && is_device(pod_name) && pci_ok(pci)
        }
        Step::Ipam { if_name, .. } => valid_ifname(if_name),
        Step::Other { name, .. } => name.len() <= NAME_MAX,
    };
    if possible { Ok(()) } else { Err(bad(&format!("a step that was never made: {step:?}"))) }
}

/// `dddd:dd:dd.d`; empty where there is none.
fn is_pci(text: &str) -> bool {
    let digits = |c: char| c.is_ascii_hexdigit() || ":.".contains(c);
    text.is_empty() || (text.len() <= 16 && text.chars().all(digits) && !text.contains(".."))
}

/// The name of an RDMA device (`IB_DEVICE_NAME_MAX` is 64); empty where there is none.
fn is_device(text: &str) -> bool {
    text.len() < 64 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

fn bad(what: &str) -> Error {
    Error::new(Code::INTERNAL, format!("the node agent answered {what}"))
        .details("nothing was done; install plugin and agent of the same release")
}

#[cfg(test)]
mod tests {
    use vhost_rdma_agent_api::{
        Attachment, Companion, NetnsMode, Nic, Personality, Pod, Record, State, Step,
    };

    use super::{nics, records};
    use crate::companion;

    fn nic(id: &str, if_name: &str) -> Nic {
        Nic {
            id: id.to_owned(),
            pool: "blue".to_owned(),
            network: "blue".to_owned(),
            if_name: if_name.to_owned(),
            mac: None,
            addresses: Vec::new(),
            mtu: None,
            personality: Personality::VhostUser {
                dir: String::new(),
                socket: String::new(),
                container_socket: String::new(),
                companion: Companion::default(),
            },
        }
    }

    fn vf(pci: &str, netdev: &str, rdma: &str) -> Nic {
        let personality = Personality::Vf {
            pci: pci.to_owned(),
            netdev: Some(netdev.to_owned()),
            rdma_device: rdma.to_owned(),
            netns_mode: NetnsMode::Exclusive,
        };
        Nic { personality, ..nic("v", "net1") }
    }

    fn record(container: &str, step: Step) -> Record {
        Record {
            pod: Pod::default(),
            attachment: Attachment {
                container_id: container.to_owned(),
                if_name: "eth0".to_owned(),
            },
            network: "net".to_owned(),
            netns: String::new(),
            state: State::Attached,
            nic: nic("a-0", "net1"),
            steps: vec![step],
            done: None,
            config: None,
        }
    }

    #[test]
    fn nics_are_those_that_were_asked_for_and_well_formed() {
        assert!(nics(&[nic("a-0", "net1"), nic("a-1", "net2")], None, "eth0").is_ok());
        assert!(nics(&[nic("a-0", "net1")], Some("a-0"), "net1").is_ok());
        assert!(nics(&[vf("0000:03:00.1", "ens1v0", "mlx5_1")], None, "eth0").is_ok());
        let many: Vec<Nic> = (0..300).map(|n| nic(&format!("a-{n}"), &format!("n{n}"))).collect();
        for (answer, device) in [
            (vec![nic("a-1", "net1")], Some("a-0")),
            (vec![nic("a-0", "net2")], Some("a-0")),
            (vec![nic("a-0", "net1"), nic("a-1", "net2")], Some("a-0")),
            (vec![], Some("a-0")),
            (vec![nic("a-0", "net1"), nic("a-0", "net2")], None),
            (vec![nic("a-0", "net1"), nic("a-1", "net1")], None),
            (vec![nic("../a", "net1")], None),
            (vec![nic("a-0", "a/b")], None),
            (vec![nic("a-0", "")], None),
            (vec![vf("../../etc", "ens1v0", "mlx5_1")], None),
            (vec![vf("0000:03:00.1", "a b", "mlx5_1")], None),
            (vec![vf("0000:03:00.1", "ens1v0", "../mlx5_1")], None),
            (many, None),
        ] {
            assert!(nics(&answer, device, "net1").is_err(), "{answer:?}");
        }
    }

    #[test]
    fn of_the_hosts_links_only_our_own_are_undone_and_of_this_container() {
        let link = |name: &str| Step::MakeLink { name: name.to_owned(), netns: None };
        let own = companion::outer("a-0", "c1");
        assert!(records(&[record("c1", link(&own))], Some("c1")).is_ok());
        assert!(records(&[record("c1", link(&own))], None).is_ok());
        assert!(records(&[record("c2", link(&own))], Some("c1")).is_err());
        assert!(records(&[record("c1", link("br0"))], Some("c1")).is_err());
        let netdev = |host: &str, pci: &str| Step::MoveNetdev {
            host_name: host.to_owned(),
            pod_name: "net1".to_owned(),
            pci: Some(pci.to_owned()),
            mac: None,
            mtu: None,
            up: true,
            kind: None,
            altnames: Vec::new(),
        };
        assert!(records(&[record("c1", netdev("ens1", "0000:03:00.1"))], None).is_ok());
        assert!(records(&[record("c1", netdev("ens/1", "0000:03:00.1"))], None).is_err());
        assert!(records(&[record("c1", netdev("ens1", "../x"))], None).is_err());
        let mut long = record("c1", link(&own));
        long.steps = vec![link(&own); 65];
        assert!(records(&[long], None).is_err());
    }
}
