//! The CNI plugin that gives pods their virtual RDMA NICs.
//!
//! It is a small program with no memory: the node agent knows which NICs a pod was granted, and
//! writes down each change of the host before it is made; the plugin makes the changes, in the
//! pod's network namespace, and undoes them from what the agent wrote down. So a plugin that is
//! killed between any two system calls leaves nothing that DEL, GC or the next DEL would not find.
//!
//! ```text
//!              ┌ companion  tap for a VM: tap ─ bridge ─ veth ═ host bridge
//!  ADD ─ nic ──┼ vf         netdev and RDMA device go into the pod
//!              ├ vf-vfio    nothing to do on the host; addresses only
//!              └ shared     nothing to do; the device node came from the kubelet
//!  DEL, GC, failed ADD ─ undo   the written steps, newest first, each harmless if never made
//!  CHECK ─ check                what was written down against what is
//! ```
//!
//! Called for every pod (chained, without Multus) it attaches all NICs of the pod, or hands
//! `prevResult` through untouched. Called with a `deviceID` (Multus) it attaches that one. What
//! comes from the runtime is read by [`cni_skel`]; netlink is [`rdma_netlink`]; the conversation
//! with the agent is [`vhost_rdma_agent_api`].

#![forbid(unsafe_code)]

mod add;
mod agent;
mod answer;
mod back;
mod check;
mod companion;
mod device_info;
mod function;
mod host;
mod ipam;
mod lock;
mod names;
mod pod;
mod rdma;
mod settings;
mod undo;
mod vf;

use cni_skel::{Answer, Attachment, Code, Error, Network, Plugin, ValidAttachment};

use crate::agent::Agent;
pub use crate::host::Host;
use crate::settings::Settings;

/// Someone or something is in the way: a name that is taken, a device that another pod has.
const CONFLICT: Code = Code(100);
/// CHECK found a difference.
const DIFFERS: Code = Code(101);
/// Something could not be put back; the next DEL tries again.
const NOT_UNDONE: Code = Code(102);

/// The plugin.
#[derive(Debug, Clone, Default)]
pub struct VhostRdma {
    /// Where things are on this host.
    pub host: Host,
}

impl Plugin for VhostRdma {
    fn add(&self, network: &Network, attachment: &Attachment) -> Result<Answer, Error> {
        add::add(network, attachment, &self.host)
    }

    fn del(&self, network: &Network, attachment: &Attachment) -> Result<(), Error> {
        let settings = Settings::lenient(network, &self.host);
        let agent = Agent::new(&settings);
        let netns = attachment.netns.as_deref();
        match agent.detach(attachment, settings.device_id.as_deref()) {
            Ok(records) if records.is_empty() => {
                ipam::release_unrecorded(network);
                Ok(())
            }
            Ok(records) => undo::records(network, &agent, &self.host, &records, netns),
            // The pods that have no NIC of ours must come and go while the agent is replaced.
            Err(error) if error.code == Code::TRY_AGAIN && !undo::has_ours(attachment) => {
                ipam::release_unrecorded(network);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn check(&self, network: &Network, attachment: &Attachment) -> Result<(), Error> {
        check::check(network, attachment, &self.host)
    }

    fn gc(&self, network: &Network, valid: &[ValidAttachment]) -> Result<(), Error> {
        let settings = Settings::lenient(network, &self.host);
        let agent = Agent::new(&settings);
        let stale = agent.gc(&network.config.name, valid)?;
        let undone = undo::records(network, &agent, &self.host, &stale, None);
        let released = ipam::collect(network, &agent, valid);
        undone.and(released)
    }

    fn status(&self, network: &Network) -> Result<(), Error> {
        let settings = Settings::of(network, &self.host)?;
        Agent::new(&settings).ready()?;
        ipam::status(network)
    }
}
