//! Who has a NIC that has a name.
//!
//! A pod names its NICs with the annotation [`NIC_ANNOTATION`]: objects of its own namespace, so
//! nobody takes another tenant's. The agent of the pod's node claims the object by writing node,
//! pod and the pod's UID into its status, on the version that it has read: of two agents that read
//! the same the API server takes one. The claim ends in one of two ways:
//!
//! - The agent takes it back when the NIC is gone from its daemon.
//! - The controller takes it back when nobody else will: the node is gone from the cluster for
//!   longer than its grace, or the API server says that the pod is. The API server is asked itself,
//!   and keeps a pod until its kubelet says that its containers have ended. So a node that is only
//!   silent keeps what its pods have.
//!
//! What is decided here is decided on one copy of the object and nothing else; agents, the
//! controller and the model of its tests share it.

use crate::{RdmaNic, RdmaNicStatus};

/// The annotation by which a pod names its NICs: names with commas between them.
pub const NIC_ANNOTATION: &str = "vhost-rdma.io/nic";
/// NICs that a pod may name.
const NAMES_MAX: usize = 16;
/// The longest name of an object (RFC 1123 subdomain).
const NAME_MAX: usize = 253;

/// The names that an annotation has.
///
/// # Errors
/// What is wrong with it.
pub fn names(annotation: &str) -> Result<Vec<String>, String> {
    let mut all: Vec<String> = Vec::new();
    // As many as one more than may be are looked at, however long it is.
    for name in annotation.split(',').take(NAMES_MAX + 1).map(str::trim) {
        let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
        if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(is_part) {
            let shown: String = name.chars().take(64).collect();
            return Err(format!("{NIC_ANNOTATION}: {shown:?} is no name of an RdmaNic"));
        }
        if all.iter().any(|other| other == name) {
            return Err(format!("{NIC_ANNOTATION} names {name:?} twice"));
        }
        all.push(name.to_owned());
    }
    if all.len() > NAMES_MAX {
        return Err(format!("{NIC_ANNOTATION}: a pod may name {NAMES_MAX} NICs"));
    }
    Ok(all)
}

/// Who wants a NIC.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claimant {
    /// The node.
    pub node: String,
    /// The pod, of the NIC's namespace.
    pub pod: String,
    /// Its UID: a pod that is made again under its name is another.
    pub pod_uid: String,
}

/// What becomes of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is the claimant's already.
    Held,
    /// Nobody has it: it is the claimant's if this is written on the same version.
    Free(RdmaNicStatus),
    /// It is not known yet whether anybody may have it.
    Wait(String),
    /// It is another's, or may be nobody's.
    Refused(String),
}

/// Whether a pod may have a NIC, as this copy of the object says.
#[must_use]
pub fn claim(nic: &RdmaNic, who: &Claimant) -> Verdict {
    let name = nic.metadata.name.as_deref().unwrap_or_default();
    let status = nic.status.clone().unwrap_or_default();
    // Whoever has it keeps it, whatever has become of the object since.
    if is_held(nic, who) {
        return Verdict::Held;
    }
    if let (Some(node), Some(pod)) = (&status.node, &status.pod) {
        let why = format!("the NIC {name:?} is that of the pod {pod:?} on the node {node:?}");
        return Verdict::Refused(why);
    }
    if nic.metadata.deletion_timestamp.is_some() {
        return Verdict::Refused(format!("the NIC {name:?} is being deleted"));
    }
    let accepted = status.conditions.iter().find(|condition| condition.type_ == "Accepted");
    match accepted {
        Some(said) if said.observed_generation == nic.metadata.generation => {
            if !said.holds() {
                return Verdict::Refused(format!("the NIC {name:?}: {}", said.message));
            }
        }
        _ => {
            let why = format!("the controller has not looked at the NIC {name:?} yet");
            return Verdict::Wait(why);
        }
    }
    Verdict::Free(RdmaNicStatus {
        node: Some(who.node.clone()),
        pod: Some(who.pod.clone()),
        pod_uid: Some(who.pod_uid.clone()),
        session: None,
        ..status
    })
}

/// Whether it is the claimant's.
#[must_use]
pub fn is_held(nic: &RdmaNic, who: &Claimant) -> bool {
    let status = nic.status.as_ref();
    status.is_some_and(|status| {
        status.node.as_ref() == Some(&who.node) && status.pod_uid.as_ref() == Some(&who.pod_uid)
    })
}

/// The status without a claim.
#[must_use]
pub fn released(status: &RdmaNicStatus) -> RdmaNicStatus {
    RdmaNicStatus { node: None, pod: None, pod_uid: None, session: None, ..status.clone() }
}

/// The MAC address of a NIC: the one that it says, or one that is made of its UID and so is the
/// same on every node and for every pod. It is locally administered and of one station (IEEE
/// 802-2014 §8.2).
#[must_use]
pub fn mac(nic: &RdmaNic) -> String {
    if let Some(mac) = &nic.spec.mac {
        return mac.clone();
    }
    let uid = nic.metadata.uid.as_deref().unwrap_or_default();
    // FNV-1a, 64 bits: 46 of them are taken.
    let hash = uid.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let [_, _, first, rest @ ..] = hash.to_be_bytes();
    let octets = [(first & 0xfc) | 0x02, rest[0], rest[1], rest[2], rest[3], rest[4]];
    octets.map(|octet| format!("{octet:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Condition, RdmaNicSpec};

    fn who(node: &str, uid: &str) -> Claimant {
        Claimant { node: node.to_owned(), pod: "db-0".to_owned(), pod_uid: uid.to_owned() }
    }

    fn nic(accepted: Option<(bool, i64)>) -> RdmaNic {
        let mut nic = RdmaNic::new("db", RdmaNicSpec::default());
        nic.metadata.generation = Some(2);
        let said = |(holds, of)| Condition::new("Accepted", holds, "R", "no").of(Some(of));
        let conditions = accepted.map(said).into_iter().collect();
        nic.status = Some(RdmaNicStatus { conditions, ..RdmaNicStatus::default() });
        nic
    }

    #[test]
    fn who_claims_first_has_it_until_it_is_released() {
        let mut nic = nic(Some((true, 2)));
        let Verdict::Free(status) = claim(&nic, &who("n1", "u1")) else { panic!("it is free") };
        nic.status = Some(status);
        assert_eq!(claim(&nic, &who("n1", "u1")), Verdict::Held);
        for other in [who("n2", "u2"), who("n1", "u2"), who("n2", "u1")] {
            let Verdict::Refused(why) = claim(&nic, &other) else { panic!("{other:?} has it") };
            assert!(why.contains("\"db-0\"") && why.contains("\"n1\""), "{why}");
        }
        nic.status = Some(released(nic.status.as_ref().unwrap()));
        assert!(matches!(claim(&nic, &who("n2", "u2")), Verdict::Free(_)));
    }

    #[test]
    fn what_the_controller_has_not_accepted_nobody_gets() {
        let asked = |nic: &RdmaNic| claim(nic, &who("n1", "u1"));
        assert!(matches!(asked(&nic(None)), Verdict::Wait(_)));
        assert!(matches!(asked(&nic(Some((true, 1)))), Verdict::Wait(_)), "of an old word");
        assert!(
            matches!(asked(&nic(Some((false, 2)))), Verdict::Refused(why) if why.contains("no"))
        );
        let mut leaving = nic(Some((true, 2)));
        let epoch = k8s_openapi::jiff::Timestamp::UNIX_EPOCH;
        leaving.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(epoch));
        assert!(matches!(asked(&leaving), Verdict::Refused(_)));
        // A pod that starts again keeps what it has.
        let mut held = nic(Some((false, 2)));
        held.status = Some(RdmaNicStatus {
            node: Some("n1".to_owned()),
            pod: Some("db-0".to_owned()),
            pod_uid: Some("u1".to_owned()),
            ..held.status.unwrap()
        });
        assert_eq!(asked(&held), Verdict::Held);
    }

    #[test]
    fn an_annotation_is_a_list_of_names() {
        assert_eq!(names("db").unwrap(), ["db"]);
        assert_eq!(names("db, cache.a").unwrap(), ["db", "cache.a"]);
        let many = vec!["a"; NAMES_MAX * 2];
        let different: Vec<String> = (0..=NAMES_MAX).map(|n| format!("n{n}")).collect();
        for bad in ["", "db,", "../x", "db,db", "A", &many.join(","), &different.join(",")] {
            assert!(names(bad).is_err(), "{bad:?}");
        }
        assert!(names(&"x".repeat(1 << 20)).unwrap_err().len() < 200);
    }

    #[test]
    fn a_mac_address_that_nobody_chose_is_the_objects_own() {
        let mut nic = nic(None);
        nic.metadata.uid = Some("7d0c".to_owned());
        let first = mac(&nic);
        assert_eq!(mac(&nic), first);
        assert!(u8::from_str_radix(&first[..2], 16).unwrap() & 3 == 2, "{first}");
        assert_eq!(first.len(), 17);
        nic.metadata.uid = Some("7d0d".to_owned());
        assert_ne!(mac(&nic), first);
        nic.spec.mac = Some("02:00:00:00:00:09".to_owned());
        assert_eq!(mac(&nic), "02:00:00:00:00:09");
    }
}
