//! Undoing what was written down: newest first, each step whether or not it was made.
//!
//! The pod's namespace may be gone. Then the kernel has removed what was made in it and has given
//! hardware back to the host, under the name that it had in the pod; what is left is to give it its
//! own name and settings again.

use std::path::Path;

use cni_skel::{Attachment, Error, Network};
use rdma_netlink::Netns;
use rdma_netlink::link::Links;
use vhost_rdma_agent_api::{Nic, Record, Step};

use crate::agent::Agent;
use crate::back::{self, Back};
use crate::function::{Functions, Renewal};
use crate::host::Host;
use crate::lock::Lock;
use crate::pod::{self, ALIAS, netlink};
use crate::{NOT_UNDONE, ipam};

/// Undoes records and tells the agent, one by one, and goes on after a failure: what one pod holds
/// must not keep another's.
///
/// # Errors
/// The first failure, with the number of others.
pub(crate) fn records(
    network: &Network,
    agent: &Agent,
    host: &Host,
    records: &[Record],
    netns: Option<&Path>,
) -> Result<(), Error> {
    let locks = host.locks();
    let mut failed: Vec<Error> = Vec::new();
    for record in records {
        let undone = || {
            // Where only an address is left the NIC is another's by now, and IPAM plugins have
            // locks of their own.
            let _lock = has_nic(record).then(|| Lock::take(&locks, &record.nic.id)).transpose()?;
            // What was said before the lock was held is old: another call may have undone it, and
            // the NIC be the next pod's, or have done more. Only under the lock it stays true.
            let again = if has_nic(record) { agent.again(record)? } else { vec![record.clone()] };
            let Some(record) = again.iter().find(|now| has_nic(now) == has_nic(record)) else {
                return Ok(());
            };
            let remembered = Path::new(&record.netns);
            let paths = [netns.unwrap_or(remembered), remembered];
            let told = record.done.as_ref();
            let addresses = told.is_none_or(|done| !done.addresses.is_empty());
            let undone = steps(network, host, &record.nic, &record.steps, &paths, addresses)?;
            let (attachment, nics) = (record.attachment.clone(), vec![record.nic.id.clone()]);
            match undone {
                Undone::All => agent.detached(attachment, nics),
                Undone::ButAddresses(error) => {
                    eprintln!("vhost-rdma: {error}");
                    agent.owing(attachment, nics, error)
                }
            }
        };
        if let Err(error) = undone() {
            failed.push(error.during(&format!("NIC {}", record.nic.id)));
        }
    }
    let others: Vec<String> = failed.iter().skip(1).map(ToString::to_string).collect();
    match failed.into_iter().next() {
        None => Ok(()),
        Some(first) if others.is_empty() => Err(first),
        Some(first) => {
            let details = format!("{} also: {}", first.details, others.join("; "));
            Err(first.details(details.trim_start()))
        }
    }
}

/// Whether an attachment has its NIC still, and not only an address that is left of it.
fn has_nic(record: &Record) -> bool {
    let own = record.steps.iter().any(|step| !matches!(step, Step::Ipam { .. }));
    own || record.steps.is_empty()
}

/// What came of it.
#[derive(Debug)]
pub(crate) enum Undone {
    /// Nothing is left.
    All,
    /// All but what the IPAM plugin gave, which it does not take back. Which plugin is asked, and
    /// with what, is the tenant's: that must not keep the NIC from others.
    ButAddresses(Error),
}

/// Undoes steps of one NIC. `netns` are the paths at which the pod's namespace may be. Without
/// `addresses` none can have been given, and nothing is owed by an IPAM plugin that fails.
///
/// # Errors
/// The first failure; the steps before it are undone all the same, since they do not stand on each
/// other.
pub(crate) fn steps(
    network: &Network,
    host: &Host,
    nic: &Nic,
    steps: &[Step],
    netns: &[&Path],
    addresses: bool,
) -> Result<Undone, Error> {
    let functions = Functions::of(host);
    // First, since its devices are on the host then, whatever the pod did with them.
    let renewal = back::renew(steps, &functions);
    let renewed = matches!(renewal, Ok(Renewal::Done));
    let mut first = Ok(());
    let mut owed = None;
    for step in steps.iter().rev() {
        match (step, step_undone(network, nic, step, netns, &functions, renewed)) {
            (Step::Ipam { .. }, Err(error)) if addresses => owed = Some(error),
            (Step::Ipam { .. }, Err(error)) => eprintln!("vhost-rdma: {error}"),
            (_, undone) => first = first.and(undone),
        }
    }
    first.and(renewal.and_then(|renewal| back::unused(steps, &renewal, &functions)))?;
    Ok(owed.map_or(Undone::All, Undone::ButAddresses))
}

fn step_undone(
    network: &Network,
    nic: &Nic,
    step: &Step,
    netns: &[&Path],
    functions: &Functions,
    renewed: bool,
) -> Result<(), Error> {
    let back = || Ok::<_, Error>(Back { nic, pods: pods(netns)?, functions, renewed });
    match step {
        Step::MakeLink { name, netns: None } => remove(&mut Links::open().map_err(netlink)?, name),
        Step::MakeLink { name, netns: Some(path) } => {
            for path in [Path::new(path)].iter().chain(netns) {
                if let Some(pod) = open_pod(path)? {
                    remove(&mut Links::open_in(&pod).map_err(netlink)?, name)?;
                }
            }
            Ok(())
        }
        Step::MoveNetdev { .. } => back()?.netdev(step),
        Step::MoveRdma { .. } => back()?.rdma(step),
        Step::Ipam { if_name, .. } => ipam::del(network, if_name),
        Step::Other { name, data } => back()?.other(name, data),
    }
}

/// The pod's namespace behind a path; `None` if it is gone, or if what is there now is the host's
/// own.
fn open_pod(path: &Path) -> Result<Option<Netns>, Error> {
    if path.as_os_str().is_empty() {
        return Ok(None);
    }
    let Ok(pod) = Netns::from_path(path) else { return Ok(None) };
    let host = Netns::current().map_err(netlink)?;
    Ok(Some(pod).filter(|pod| *pod != host))
}

fn pods(paths: &[&Path]) -> Result<Vec<Netns>, Error> {
    let mut pods: Vec<Netns> = Vec::new();
    for path in paths {
        if let Some(pod) = open_pod(path)?
            && !pods.contains(&pod)
        {
            pods.push(pod);
        }
    }
    Ok(pods)
}

/// Removes what we made. Its name was free when it was written down; what has it now and is
/// hardware is not ours.
fn remove(links: &mut Links, name: &str) -> Result<(), Error> {
    let Some(link) = pod::find(links, name)? else { return Ok(()) };
    if !matches!(link.driver_kind.as_deref(), Some("veth" | "bridge" | "tun")) {
        return Ok(());
    }
    match links.delete(link.index) {
        Err(error) if !error.is_not_found() => {
            let msg = format!("interface {name} is not removed: {error}");
            Err(Error::new(NOT_UNDONE, msg))
        }
        _ => Ok(()),
    }
}

/// Whether anything on this host says that the container has a NIC of ours: asked when the agent
/// cannot be.
pub(crate) fn has_ours(attachment: &Attachment) -> bool {
    let ours = |links: rdma_netlink::Result<Links>| {
        let mark = format!(" {}", attachment.container_id);
        let listed = links.and_then(|mut links| links.list()).unwrap_or_default();
        listed
            .iter()
            .filter_map(|link| link.alias.as_deref())
            .any(|alias| alias.starts_with(ALIAS) && alias.ends_with(&mark))
    };
    let pod = attachment.netns.as_deref().and_then(|path| open_pod(path).ok().flatten());
    ours(Links::open()) || pod.is_some_and(|pod| ours(Links::open_in(&pod)))
}
